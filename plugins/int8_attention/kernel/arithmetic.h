// The arithmetic of speceyes::Int8KVAttention, one source for the device and the host: write, attend to a chunk, join.
//
// Sums run in ascending order of channels, slots and chunks, by fmaf where a product is added. A token's result then
// depends on its own row alone, and device and host differ in expf only.
#pragma once
#include "block.h"

constexpr int CHUNK = 128;   // slots that a block attends to, one for each thread
constexpr int ROWS = 8;      // query rows (token and head) that share the chunk a block has loaded
constexpr int PIECE = 16;    // codes of one load
constexpr int WIDEST = 256;  // channels of a head, at most
constexpr float SMALLEST = 127 * 1.17549435e-38f;
static_assert(CHUNK == THREADS, "a thread has one slot");

struct alignas(PIECE) Piece {
  int8_t codes[PIECE];
};
struct alignas(4) Quad {
  int8_t codes[4];
};

// The new keys or values of all rows, and where they go. Codes [batch, kv_heads, capacity, head_dim].
template <class T> struct Write {
  const T *states;      // [batch, width, kv_heads, head_dim]
  const float *center;  // [kv_heads, head_dim], or null: nothing is subtracted
  const int64_t *write_index;
  int width, kv_heads, capacity, head_dim;
  int8_t *codes;
  float *scales;
};

struct WriteMemory {
  float values[WIDEST];
};

// NaN is larger than anything, so that it reaches the result.
HD float larger(float a, float b) { return b > a || b != b ? b : a; }

// One token of one head. What does not fit into the cache is not written. NaN or infinity make the scale NaN.
template <class T> HD void write(const Block &block, WriteMemory &memory, const Write<T> &of, int token, int head, int row) {
  const int64_t slot = of.write_index[row] + token;
  if (slot < 0 || slot >= of.capacity) return;
  const int64_t from = (static_cast<int64_t>(row) * of.width + token) * of.kv_heads + head;
  const int64_t to = (static_cast<int64_t>(row) * of.kv_heads + head) * of.capacity + slot;
  block.each([&](int thread) {
    for (int c = thread; c < of.head_dim; c += THREADS)
      memory.values[c] = static_cast<float>(of.states[from * of.head_dim + c]) -
                         (of.center ? of.center[head * of.head_dim + c] : 0.0f);
  });
  block.each([&](int thread) {
    float largest = 0;
    UNROLL(4) for (int c = 0; c < of.head_dim; ++c) largest = larger(largest, fabsf(memory.values[c]));
    const float scale = largest < SMALLEST ? 1.0f : largest < INFINITY ? largest / 127 : NAN;
    for (int c = thread; c < of.head_dim; c += THREADS)
      of.codes[to * of.head_dim + c] = static_cast<int8_t>(fminf(fmaxf(rintf(memory.values[c] / scale), -127), 127));
    if (thread == 0) of.scales[to] = scale;
  });
}

// Queries over a cache, and a partial result for each of its chunks.
template <class T> struct Attend {
  const T *query;                          // [batch, width, heads, head_dim]
  const int8_t *keys, *values;             // [batch, kv_heads, capacity, head_dim]
  const float *key_scales, *value_scales;  // [batch, kv_heads, capacity]
  const bool *mask;                        // [batch, width, capacity]
  float scale;
  int width, heads, kv_heads, capacity, chunks;
  float *highest, *weights;  // [batch, width, heads, chunks]; highest is -inf and the rest unwritten if nothing is seen
  float *sums;               // [batch, width, heads, chunks, head_dim]
};

// Rows of codes stand an odd number of pieces apart: threads that read a piece of a slot each meet no bank twice.
template <int D> struct AttendMemory {
  static constexpr int STRIDE = (D / PIECE | 1) * PIECE;
  alignas(PIECE) int8_t codes[CHUNK * STRIDE];
  alignas(PIECE) float queries[ROWS][D];
  float weights[ROWS][CHUNK + 1], scales[CHUNK], highest[ROWS];
  int seen;
};

// `slots` rows of codes from global memory, by pieces.
template <int D> HD void load(AttendMemory<D> &memory, const int8_t *codes, int slots, int thread) {
  constexpr int PIECES = D / PIECE;
  UNROLL(4) for (int at = thread; at < slots * PIECES; at += THREADS)
    *reinterpret_cast<Piece *>(memory.codes + at / PIECES * AttendMemory<D>::STRIDE + at % PIECES * PIECE) =
        reinterpret_cast<const Piece *>(codes)[at];
}

// One chunk of one kv head, for ROWS of the query rows that read this head.
template <int D, class T>
HD void attend(const Block &block, AttendMemory<D> &memory, const Attend<T> &of, int chunk, int tile, int head, int row) {
  constexpr int STRIDE = AttendMemory<D>::STRIDE;
  const int group = of.heads / of.kv_heads, first_row = tile * ROWS, left = of.width * group - first_row;
  const int rows = left < ROWS ? left : ROWS;
  const int first = chunk * CHUNK, slots = of.capacity - first < CHUNK ? of.capacity - first : CHUNK;
  const int64_t held = (static_cast<int64_t>(row) * of.kv_heads + head) * of.capacity + first;
  const auto token = [&](int r) { return static_cast<int64_t>(row) * of.width + (first_row + r) / group; };
  const auto asked = [&](int r) { return token(r) * of.heads + head * group + (first_row + r) % group; };

  block.each([&](int thread) {
    UNROLL(1) for (int at = thread; at < rows * D; at += THREADS)
      memory.queries[at / D][at % D] = static_cast<float>(of.query[asked(at / D) * D + at % D]);
    if (thread == 0) memory.seen = 0;
  });
  block.each([&](int slot) {
    UNROLL(1) for (int r = 0; r < rows; ++r) {
      const bool visible = slot < slots && of.mask[token(r) * of.capacity + first + slot];
      memory.weights[r][slot] = visible ? 0.0f : -INFINITY;
      if (visible) memory.seen = 1;
    }
  });
  if (!memory.seen) {
    block.each([&](int r) {
      if (r < rows) of.highest[asked(r) * of.chunks + chunk] = -INFINITY;
    });
    return;
  }
  block.each([&](int thread) { load(memory, of.keys + held * D, slots, thread); });
  block.each([&](int slot) {
    if (slot >= slots) return;
    UNROLL(1) for (int piece = 0; piece < D; piece += PIECE) {
      const Piece keys = *reinterpret_cast<const Piece *>(memory.codes + slot * STRIDE + piece);
      UNROLL(1) for (int r = 0; r < rows; ++r) {
        float dots[4] = {};
        UNROLL(PIECE) for (int c = 0; c < PIECE; ++c)
          dots[c % 4] = fmaf(memory.queries[r][piece + c], static_cast<float>(keys.codes[c]), dots[c % 4]);
        memory.weights[r][slot] += (dots[0] + dots[1]) + (dots[2] + dots[3]);
      }
    }
    const float scale = of.key_scales[held + slot] * of.scale;
    UNROLL(1) for (int r = 0; r < rows; ++r)
      if (memory.weights[r][slot] != -INFINITY) memory.weights[r][slot] *= scale;
  });
  block.each([&](int r) {
    if (r >= rows) return;
    float highest = -INFINITY;
    UNROLL(4) for (int slot = 0; slot < CHUNK; ++slot) highest = larger(highest, memory.weights[r][slot]);
    memory.highest[r] = of.highest[asked(r) * of.chunks + chunk] = highest;
  });
  block.each([&](int slot) {
    UNROLL(1) for (int r = 0; r < rows; ++r) {
      const float score = memory.weights[r][slot];
      memory.weights[r][slot] = score == -INFINITY ? 0.0f : expf(score - memory.highest[r]);
    }
    if (slot < slots) memory.scales[slot] = of.value_scales[held + slot];
    load(memory, of.values + held * D, slots, slot);
  });
  block.each([&](int thread) {
    if (thread < rows) {
      float total = 0;
      UNROLL(4) for (int slot = 0; slot < slots; ++slot) total += memory.weights[thread][slot];
      of.weights[asked(thread) * of.chunks + chunk] = total;
    }
    UNROLL(1) for (int at = thread; at < rows * D / 4; at += THREADS) {
      const int r = at / (D / 4), first_channel = at % (D / 4) * 4;
      float sums[4] = {};
      UNROLL(4) for (int slot = 0; slot < slots; ++slot) {
        const float weight = memory.weights[r][slot], worth = weight == 0 ? 0.0f : weight * memory.scales[slot];
        const Quad quad = *reinterpret_cast<const Quad *>(memory.codes + slot * STRIDE + first_channel);
        UNROLL(4) for (int c = 0; c < 4; ++c) sums[c] = fmaf(worth, static_cast<float>(quad.codes[c]), sums[c]);
      }
      UNROLL(4) for (int c = 0; c < 4; ++c) of.sums[(asked(r) * of.chunks + chunk) * D + first_channel + c] = sums[c];
    }
  });
}

// The chunks of one query row for one channel; a token that saw nothing gives 0. `sums` is [chunks, head_dim].
HD float join(const float *highest, const float *weights, const float *sums, int chunks, int head_dim, int channel) {
  float most = -INFINITY, total = 0, sum = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) most = larger(most, highest[chunk]);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (highest[chunk] == -INFINITY) continue;
    const float share = expf(highest[chunk] - most);
    total = fmaf(share, weights[chunk], total);
    sum = fmaf(share, sums[static_cast<int64_t>(chunk) * head_dim + channel], sum);
  }
  return most == -INFINITY ? 0.0f : sum / total;
}

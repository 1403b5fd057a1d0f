// The kernels' blocks, one after the other on the host, for a comparison with the reference where there is no device.
#include <cstring>
#include <vector>
#include "arithmetic.h"
#if __has_include(<cuda_fp16.h>) && __has_include(<cuda_bf16.h>)
#define HALVES
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Shared memory and partial results begin as NaN: what is read before it is written would show.
template <class Memory> static void spoil(Memory &memory) { std::memset(static_cast<void *>(&memory), 0xff, sizeof memory); }

template <int D, class T> static void attend_all(const Block &block, const Attend<T> &of, int batch) {
  static AttendMemory<D> memory;
  const int tiles = (of.width * (of.heads / of.kv_heads) + ROWS - 1) / ROWS;
  for (int row = 0; row < batch; ++row)
    for (int tile = 0; tile < tiles; ++tile)
      for (int head = 0; head < of.kv_heads; ++head)
        for (int chunk = 0; chunk < of.chunks; ++chunk) {
          spoil(memory);
          attend(block, memory, of, chunk, tile, head, row);
        }
}

template <class T>
static int run(bool backwards, const T *query, const T *key, const T *value, const float *center,
               const int64_t *write_index, int8_t *keys, int8_t *values, float *key_scales, float *value_scales,
               const bool *mask, float scale, int batch, int width, int heads, int kv_heads, int capacity, int head_dim,
               T *attended) {
  const Block block{backwards};
  for (int side = 0; side < 2; ++side)
    for (int row = 0; row < batch; ++row)
      for (int at = 0; at < width * kv_heads; ++at) {
        WriteMemory memory;
        spoil(memory);
        const Write<T> of{side ? value : key, side ? nullptr : center, write_index, width, kv_heads, capacity, head_dim,
                          side ? values : keys, side ? value_scales : key_scales};
        write(block, memory, of, at / kv_heads, at % kv_heads, row);
      }
  const int chunks = (capacity + CHUNK - 1) / CHUNK;
  const size_t rows = static_cast<size_t>(batch) * width * heads, partials = rows * chunks;
  std::vector<float> highest(partials, NAN), weights(partials, NAN), sums(partials * head_dim, NAN);
  const Attend<T> of{query, keys,  values,   key_scales, value_scales, mask,           scale,          width,
                     heads, kv_heads, capacity, chunks,     highest.data(), weights.data(), sums.data()};
  switch (head_dim) {
    case 64: attend_all<64>(block, of, batch); break;
    case 80: attend_all<80>(block, of, batch); break;
    case 96: attend_all<96>(block, of, batch); break;
    case 128: attend_all<128>(block, of, batch); break;
    case 256: attend_all<256>(block, of, batch); break;
    default: return 1;
  }
  for (size_t row = 0; row < rows; ++row)
    for (int channel = 0; channel < head_dim; ++channel)
      attended[row * head_dim + channel] = static_cast<T>(
          join(&highest[row * chunks], &weights[row * chunks], &sums[row * chunks * head_dim], chunks, head_dim, channel));
  return 0;
}

#define OF_TYPE(TYPE, T)                                                                                               \
  extern "C" int run_##TYPE(bool backwards, const T *query, const T *key, const T *value, const float *center,         \
                            const int64_t *write_index, int8_t *keys, int8_t *values, float *key_scales,               \
                            float *value_scales, const bool *mask, float scale, int batch, int width, int heads,       \
                            int kv_heads, int capacity, int head_dim, T *attended) {                                   \
    return run(backwards, query, key, value, center, write_index, keys, values, key_scales, value_scales, mask, scale, \
               batch, width, heads, kv_heads, capacity, head_dim, attended);                                           \
  }
OF_TYPE(float, float)
#ifdef HALVES
OF_TYPE(half, __half)
OF_TYPE(bfloat16, __nv_bfloat16)
#endif

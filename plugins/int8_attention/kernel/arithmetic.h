// The arithmetic of speceyes::Int8KVAttention, one source for the device and the host.
//
// A team of LANES threads shares a slot of the cache, 16 channels (one 16-byte load) a lane. What each lane holds is a
// Lane<T>: one value on the device, the values of all lanes on the host, where a team is a loop. Sums over lanes, teams
// and chunks run in ascending order, so that a token's result depends on nothing but its own row.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HD __host__ __device__ __forceinline__
#else
#define HD inline
#endif

constexpr int CHUNK = 128, CHANNELS = 16;
constexpr float SMALLEST = 127 * 1.17549435e-38f;

#ifdef __CUDA_ARCH__
template <int LANES> struct Team {
  static constexpr int HELD = 1;
  int lane, base;
  unsigned mask;
  HD int channel(int) const { return lane * CHANNELS; }
  HD float sum(const float *held) const {
    float total = 0;
    for (int other = 0; other < LANES; ++other) total += __shfl_sync(mask, held[0], base + other);
    return total;
  }
};
#else
template <int LANES> struct Team {
  static constexpr int HELD = LANES;
  HD int channel(int held) const { return held * CHANNELS; }
  HD float sum(const float *held) const {
    float total = 0;
    for (int other = 0; other < LANES; ++other) total += held[other];
    return total;
  }
};
#endif

// Running softmax of one token and head over the slots of one team: highest score, weight, weighted values.
template <int HELD> struct Partial {
  float highest = -INFINITY, weight = 0, values[HELD][CHANNELS] = {};
};

struct alignas(16) Codes {
  int8_t at[CHANNELS];
};

template <class T> HD float widen(T value) { return static_cast<float>(value); }

// A key or value of `channels` elements, less `center` (null: nothing), to codes and their scale.
template <class T> HD void round_token(const T *states, const float *center, int channels, int8_t *codes, float *scale) {
  float largest = 0;
  for (int c = 0; c < channels; ++c) largest = fmaxf(largest, fabsf(widen(states[c]) - (center ? center[c] : 0)));
  const float step = largest < SMALLEST ? 1.0f : largest / 127;
  for (int c = 0; c < channels; ++c) {
    const float code = rintf((widen(states[c]) - (center ? center[c] : 0)) / step);
    codes[c] = static_cast<int8_t>(fminf(fmaxf(code, -127), 127));
  }
  *scale = step;
}

// Slots `first`, `first + stride`, … below `end` of one head; `keys`, `values` [slots, LANES * 16], scales [slots].
template <int LANES, class T>
HD Partial<Team<LANES>::HELD> attend(const Team<LANES> &team, const T *query, float scale, const int8_t *keys,
                                     const float *key_scales, const int8_t *values, const float *value_scales,
                                     const bool *visible, int first, int end, int stride) {
  constexpr int HELD = Team<LANES>::HELD;
  Partial<HELD> found;
  for (int slot = first; slot < end; slot += stride) {
    if (!visible[slot]) continue;
    const int64_t row = static_cast<int64_t>(slot) * LANES * CHANNELS;
    float dots[HELD];
    for (int held = 0; held < HELD; ++held) {
      const int channel = team.channel(held);
      const Codes codes = *reinterpret_cast<const Codes *>(keys + row + channel);
      float dot = 0;
      for (int c = 0; c < CHANNELS; ++c) dot += widen(query[channel + c]) * codes.at[c];
      dots[held] = dot;
    }
    const float score = team.sum(dots) * key_scales[slot] * scale;
    const float higher = fmaxf(found.highest, score);
    const float shrink = expf(found.highest - higher), weight = expf(score - higher);
    const float worth = weight * value_scales[slot];
    for (int held = 0; held < HELD; ++held) {
      const Codes codes = *reinterpret_cast<const Codes *>(values + row + team.channel(held));
      for (int c = 0; c < CHANNELS; ++c) found.values[held][c] = found.values[held][c] * shrink + worth * codes.at[c];
    }
    found.weight = found.weight * shrink + weight;
    found.highest = higher;
  }
  return found;
}

// Joins `count` partial results of one channel, in order; a token that saw nothing gives 0.
HD float join(const float *highest, const float *weights, const float *values, int count, int stride) {
  float most = -INFINITY, weight = 0, value = 0;
  for (int part = 0; part < count; ++part) most = fmaxf(most, highest[part]);
  if (most == -INFINITY) return 0;
  for (int part = 0; part < count; ++part) {
    const float share = expf(highest[part] - most);
    weight += share * weights[part];
    value += share * values[part * stride];
  }
  return value / weight;
}

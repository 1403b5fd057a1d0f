// Three kernels: round and write, attend to chunks of the cache, join the chunks. Never run on a device yet.
#include "arithmetic.h"

// One thread a token, head and side. states [batch, width, kv_heads * D], codes [batch, kv_heads, capacity, D].
template <class T>
__device__ void write(const T *key, const T *value, const float *center, const int64_t *write_index, int8_t *keys,
                      int8_t *values, float *key_scales, float *value_scales, int batch, int width, int kv_heads,
                      int capacity, int channels) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= 2 * batch * width * kv_heads) return;
  const int side = at % 2, head = at / 2 % kv_heads, token = at / 2 / kv_heads % width, row = at / 2 / kv_heads / width;
  const int64_t from = (static_cast<int64_t>(row * width + token) * kv_heads + head) * channels;
  const int64_t to = static_cast<int64_t>(row * kv_heads + head) * capacity + write_index[row] + token;
  round_token((side ? value : key) + from, side ? nullptr : center + head * channels, channels,
              (side ? values : keys) + to * channels, (side ? value_scales : key_scales) + to);
}

// One block of 32 threads a (chunk, token and query head, row): teams take its slots in turn.
// highest, weights [batch, width, heads, parts], sums [batch, width, heads, parts, D]; parts = chunks * teams.
template <class T, int LANES>
__device__ void attend_chunk(const T *query, const int8_t *keys, const float *key_scales, const int8_t *values,
                             const float *value_scales, const bool *mask, float *highest, float *weights, float *sums,
                             float scale, int width, int heads, int kv_heads, int capacity) {
  constexpr int TEAMS = 32 / LANES, D = LANES * CHANNELS;
  const int number = threadIdx.x / LANES, token = blockIdx.y / heads, head = blockIdx.y % heads, row = blockIdx.z;
  if (number >= TEAMS) return;
  const unsigned members = ((LANES == 32 ? 0u : 1u << LANES) - 1u) << (number * LANES);
  const Team<LANES> team{static_cast<int>(threadIdx.x) % LANES, number * LANES, members};
  const int64_t held = static_cast<int64_t>(row * kv_heads + head / (heads / kv_heads)) * capacity;
  const int64_t asked = static_cast<int64_t>(row * width + token) * heads + head;
  const int first = blockIdx.x * CHUNK, end = min(first + CHUNK, capacity);
  const auto found = attend(team, query + asked * D, scale, keys + held * D, key_scales + held, values + held * D,
                            value_scales + held, mask + static_cast<int64_t>(row * width + token) * capacity,
                            first + number, end, TEAMS);
  const int64_t part = (asked * gridDim.x + blockIdx.x) * TEAMS + number;
  if (team.lane == 0) highest[part] = found.highest, weights[part] = found.weight;
  for (int c = 0; c < CHANNELS; ++c) sums[part * D + team.lane * CHANNELS + c] = found.values[0][c];
}

#define WRITE(NAME, T)                                                                                                 \
  extern "C" __global__ void NAME(const T *key, const T *value, const float *center, const int64_t *write_index,       \
                                  int8_t *keys, int8_t *values, float *key_scales, float *value_scales, int batch,     \
                                  int width, int kv_heads, int capacity, int channels) {                               \
    write(key, value, center, write_index, keys, values, key_scales, value_scales, batch, width, kv_heads, capacity,   \
          channels);                                                                                                   \
  }
#define ATTEND(NAME, T, D)                                                                                             \
  extern "C" __global__ void NAME(const T *query, const int8_t *keys, const float *key_scales, const int8_t *values,   \
                                  const float *value_scales, const bool *mask, float *highest, float *weights,         \
                                  float *sums, float scale, int width, int heads, int kv_heads, int capacity) {        \
    attend_chunk<T, D / CHANNELS>(query, keys, key_scales, values, value_scales, mask, highest, weights, sums, scale,  \
                                  width, heads, kv_heads, capacity);                                                   \
  }
#define ATTEND_ALL(TYPE, T) ATTEND(attend_##TYPE##_64, T, 64) ATTEND(attend_##TYPE##_80, T, 80)                        \
  ATTEND(attend_##TYPE##_96, T, 96) ATTEND(attend_##TYPE##_128, T, 128) ATTEND(attend_##TYPE##_256, T, 256)

WRITE(write_float, float)
WRITE(write_half, __half)
WRITE(write_bfloat16, __nv_bfloat16)
ATTEND_ALL(float, float)
ATTEND_ALL(half, __half)
ATTEND_ALL(bfloat16, __nv_bfloat16)

// One thread a token, head and channel.
extern "C" __global__ void join_chunks(const float *highest, const float *weights, const float *sums, float *attended,
                                       int64_t count, int parts, int channels) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count * channels) return;
  const int64_t asked = at / channels;
  attended[at] = join(highest + asked * parts, weights + asked * parts, sums + asked * parts * channels + at % channels,
                      parts, channels);
}

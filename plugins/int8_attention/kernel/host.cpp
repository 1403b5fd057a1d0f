// The kernels' arithmetic in loops, for a comparison with the reference on a machine without a device.
#include <algorithm>
#include <vector>
#include "arithmetic.h"

template <int LANES>
static void run(const float *query, const int8_t *keys, const float *key_scales, const int8_t *values,
                const float *value_scales, const bool *mask, float *attended, float scale, int batch, int width, int heads,
                int kv_heads, int capacity) {
  constexpr int TEAMS = 32 / LANES, D = LANES * CHANNELS;
  const int parts = (capacity + CHUNK - 1) / CHUNK * TEAMS;
  std::vector<float> highest(parts), weights(parts), sums(static_cast<size_t>(parts) * D);
  for (int64_t asked = 0; asked < static_cast<int64_t>(batch) * width * heads; ++asked) {
    const int head = asked % heads, row = asked / heads / width;
    const int64_t held = static_cast<int64_t>(row * kv_heads + head / (heads / kv_heads)) * capacity;
    for (int part = 0; part < parts; ++part) {
      const int first = part / TEAMS * CHUNK;
      const auto found = attend(Team<LANES>{}, query + asked * D, scale, keys + held * D, key_scales + held,
                                values + held * D, value_scales + held, mask + asked / heads * capacity,
                                first + part % TEAMS, std::min(first + CHUNK, capacity), TEAMS);
      highest[part] = found.highest, weights[part] = found.weight;
      for (int d = 0; d < D; ++d) sums[static_cast<size_t>(part) * D + d] = found.values[d / CHANNELS][d % CHANNELS];
    }
    for (int d = 0; d < D; ++d)
      attended[asked * D + d] = join(highest.data(), weights.data(), sums.data() + d, parts, D);
  }
}

extern "C" int int8_attention(const float *query, const float *key, const float *value, const float *center,
                              const int64_t *write_index, int8_t *keys, int8_t *values, float *key_scales,
                              float *value_scales, const bool *mask, float *attended, float scale, int batch, int width,
                              int heads, int kv_heads, int capacity, int channels) {
  for (int row = 0; row < batch; ++row)
    for (int token = 0; token < width; ++token)
      for (int head = 0; head < kv_heads; ++head) {
        const int64_t from = (static_cast<int64_t>(row * width + token) * kv_heads + head) * channels;
        const int64_t to = static_cast<int64_t>(row * kv_heads + head) * capacity + write_index[row] + token;
        round_token(key + from, center + head * channels, channels, keys + to * channels, key_scales + to);
        round_token(value + from, static_cast<const float *>(nullptr), channels, values + to * channels, value_scales + to);
      }
#define CASE(D)                                                                                                        \
  case D:                                                                                                              \
    run<D / CHANNELS>(query, keys, key_scales, values, value_scales, mask, attended, scale, batch, width, heads,       \
                      kv_heads, capacity);                                                                             \
    return 0;
  switch (channels) { CASE(64) CASE(80) CASE(96) CASE(128) CASE(256) }
  return 1;
}

// The kernels, with their arguments in the order in which TensorRT gives them: inputs, sizes, outputs. An output that is
// the input itself, changed in place, comes twice. `scale` comes as the bits of a float, for TensorRT gives integers only.
#include "arithmetic.h"

// Blocks: (token and kv head, side, row). Side 0 is the key, 1 the value.
template <class T>
__device__ void write_token(const T *key, const T *value, const float *center, const int64_t *write_index, int width,
                            int kv_heads, int capacity, int head_dim, int8_t *keys, int8_t *values, float *key_scales,
                            float *value_scales) {
  __shared__ WriteMemory memory;
  const bool is_key = blockIdx.y == 0;
  const Write<T> of{is_key ? key : value, is_key ? center : nullptr, write_index, width, kv_heads, capacity, head_dim,
                    is_key ? keys : values, is_key ? key_scales : value_scales};
  write(Block{}, memory, of, blockIdx.x / kv_heads, blockIdx.x % kv_heads, blockIdx.z);
}

// Blocks: (chunk, tile of query rows and kv head, row).
template <int D, class T>
__device__ void attend_chunk(const T *query, const int8_t *keys, const int8_t *values, const float *key_scales,
                             const float *value_scales, const bool *mask, int scale, int width, int heads, int kv_heads,
                             int capacity, float *highest, float *weights, float *sums) {
  __shared__ AttendMemory<D> memory;
  const Attend<T> of{query,   keys,  values,   key_scales, value_scales,                mask,    __int_as_float(scale),
                     width,   heads, kv_heads, capacity,   static_cast<int>(gridDim.x), highest, weights,
                     sums};
  attend(Block{}, memory, of, blockIdx.x, blockIdx.y / kv_heads, blockIdx.y % kv_heads, blockIdx.z);
}

// Blocks: (query row).
template <class T>
__device__ void join_chunks(const float *highest, const float *weights, const float *sums, int chunks, int head_dim,
                            T *attended) {
  const int64_t row = blockIdx.x, first = row * chunks;
  Block{}.each([&](int thread) {
    for (int channel = thread; channel < head_dim; channel += THREADS)
      attended[row * head_dim + channel] = static_cast<T>(
          join(highest + first, weights + first, sums + first * head_dim, chunks, head_dim, channel));
  });
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define OF_HEAD_DIM(TYPE, T, D)                                                                                        \
  KERNEL attend_##TYPE##_##D(const T *query, const int8_t *keys, const int8_t *values, const float *key_scales,        \
                             const float *value_scales, const bool *mask, int scale, int width, int heads,             \
                             int kv_heads, int capacity, float *highest, float *weights, float *sums) {                \
    attend_chunk<D>(query, keys, values, key_scales, value_scales, mask, scale, width, heads, kv_heads, capacity,      \
                    highest, weights, sums);                                                                           \
  }
#define OF_TYPE(TYPE, T)                                                                                               \
  KERNEL write_##TYPE(const T *key, const T *value, const float *center, const int64_t *write_index,                   \
                      const int8_t *, const int8_t *, const float *, const float *, int width, int kv_heads,           \
                      int capacity, int head_dim, int8_t *keys, int8_t *values, float *key_scales,                     \
                      float *value_scales) {                                                                           \
    write_token(key, value, center, write_index, width, kv_heads, capacity, head_dim, keys, values, key_scales,        \
                value_scales);                                                                                         \
  }                                                                                                                    \
  KERNEL join_##TYPE(const T *, const float *highest, const float *weights, const float *sums, int chunks,             \
                     int head_dim, T *attended) {                                                                      \
    join_chunks(highest, weights, sums, chunks, head_dim, attended);                                                   \
  }                                                                                                                    \
  OF_HEAD_DIM(TYPE, T, 64)                                                                                             \
  OF_HEAD_DIM(TYPE, T, 80) OF_HEAD_DIM(TYPE, T, 96) OF_HEAD_DIM(TYPE, T, 128) OF_HEAD_DIM(TYPE, T, 256)

OF_TYPE(float, float)
#ifdef HALVES
OF_TYPE(half, __half)
OF_TYPE(bfloat16, __nv_bfloat16)
#endif

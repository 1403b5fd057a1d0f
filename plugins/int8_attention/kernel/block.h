// What a kernel needs of its surroundings: on the device a block of threads, on the host a loop in place of them.
#pragma once
#include <cmath>
#include <cstdint>

constexpr int THREADS = 128;

#if __has_include(<cuda_bf16.h>) && __has_include(<cuda_fp16.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HALVES
#endif

#ifdef __CUDACC__
#define HD __device__ __forceinline__
#define PRAGMA(TEXT) _Pragma(#TEXT)
#define UNROLL(TIMES) PRAGMA(unroll TIMES)
struct Block {
  // Every thread takes the step; none goes on before all have.
  template <class Step> HD void each(Step step) const {
    step(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};
#else
#define HD inline
#define UNROLL(TIMES)
static bool backwards;
struct Block {
  // A step that depended on the order of threads would show a difference between the two orders.
  template <class Step> void each(Step step) const {
    for (int thread = 0; thread < THREADS; ++thread) step(backwards ? THREADS - 1 - thread : thread);
  }
};
#endif

// The kernels for the host, with their own names and arguments: `place` says which block the next call is.
#include <cstring>
#include "arithmetic.h"

#undef __device__
#undef __global__
#undef __shared__
#undef __launch_bounds__
#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(COUNT)

static struct { int x, y, z; } blockIdx, gridDim;

static float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#include "kernels.cu"

extern "C" void place(int x, int y, int z, int width, bool last_thread_first) {
  blockIdx = {x, y, z}, gridDim.x = width, backwards = last_thread_first;
}

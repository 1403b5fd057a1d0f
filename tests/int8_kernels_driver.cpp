// CUDA's driver on the host (cuda_on_host/driver.c) with modules: a kernel is its own source, compiled for the host. The
// types of its arguments are those of its signature, and it runs block by block when the stream comes to it.
#include <cstdlib>
#include <functional>
#include <string>
#include <tuple>
#include "host.cpp"

extern "C" int driver_address(const char *name, void **call, int version, uint64_t flags, int *status);
extern "C" int cuLaunchHostFunc(void *stream, void (*call)(void *), void *data);

enum { OK = 0, INVALID_IMAGE = 200, NOT_FOUND = 500, OUT_OF_RESOURCES = 701 };

struct Kernel {
  const char *name;
  std::function<void()> (*prepare)(void **arguments);
};

// The arguments as they are now; the call comes later.
template <auto function, class... A> static std::function<void()> prepare_as(void (*)(A...), void **arguments) {
  const auto copied = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::tuple<A...>(*static_cast<std::remove_cv_t<A> *>(arguments[I])...);
  }(std::index_sequence_for<A...>{});
  return [copied] { std::apply(function, copied); };
}

#define NAMED(NAME) {#NAME, [](void **arguments) { return prepare_as<NAME>(NAME, arguments); }},
#define OF_KIND(KIND)                                                                                                  \
  NAMED(write_##KIND) NAMED(join_##KIND) NAMED(attend_##KIND##_64) NAMED(attend_##KIND##_80) NAMED(attend_##KIND##_96) \
  NAMED(attend_##KIND##_128) NAMED(attend_##KIND##_256)
static const Kernel kernels[] = {
    OF_KIND(float)
#ifdef HALVES
    OF_KIND(half) OF_KIND(bfloat16)
#endif
};

struct Launch {
  int grid[3];
  std::function<void()> block;
};

static void run(void *data) {
  const Launch &launch = *static_cast<Launch *>(data);
  for (int x = 0; x < launch.grid[0]; ++x)
    for (int y = 0; y < launch.grid[1]; ++y)
      for (int z = 0; z < launch.grid[2]; ++z) place(x, y, z, launch.grid[0], false), launch.block();
}

extern "C" int cuModuleLoadData(void **module, const void *image) {
  const std::string text(static_cast<const char *>(image));
  if (text.find(".version") == std::string::npos) return INVALID_IMAGE;
  *module = new std::string(text);
  return OK;
}
extern "C" int cuModuleGetFunction(const Kernel **function, const std::string *module, const char *name) {
  if (module->find(".visible .entry " + std::string(name) + "(") == std::string::npos) return NOT_FOUND;
  for (const Kernel &kernel : kernels)
    if (!std::strcmp(kernel.name, name)) return *function = &kernel, OK;
  return NOT_FOUND;
}
extern "C" int cuLaunchKernel(const Kernel *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                              unsigned, void *stream, void **arguments, void **) {
  if (threads != THREADS) return OUT_OF_RESOURCES;
  const Launch launch{{static_cast<int>(x), static_cast<int>(y), static_cast<int>(z)}, kernel->prepare(arguments)};
  return cuLaunchHostFunc(stream, run, new Launch(launch));
}
extern "C" int cuGetProcAddress_v2(const char *name, void **call, int version, uint64_t flags, int *status) {
  const std::string wanted(name);
  if (wanted == "cuModuleLoadData") return *call = reinterpret_cast<void *>(cuModuleLoadData), OK;
  if (wanted == "cuModuleGetFunction") return *call = reinterpret_cast<void *>(cuModuleGetFunction), OK;
  if (wanted == "cuLaunchKernel") return *call = reinterpret_cast<void *>(cuLaunchKernel), OK;
  return driver_address(name, call, version, flags, status);
}

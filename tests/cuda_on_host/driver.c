/* CUDA's driver interface on the host, as far as the runtime uses it: memory, one kind of stream, copies, graphs, host
 * functions. What is issued waits until the stream is synchronised, as on a device, so that a result that is read too early
 * is a wrong one. Every copy is checked against the live allocations. Nothing here computes: it has no kernels. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };

typedef struct { size_t sx, sy; int stype; const void *shost; uint64_t sdev; void *sarray; size_t spitch;
                 size_t dx, dy; int dtype; void *dhost; uint64_t ddev; void *darray; size_t dpitch;
                 size_t width, height; } Copy2D;
typedef struct { enum { COPY, SET, CALL } kind; char *to; const char *from; size_t size, pitch, from_pitch, count;
                 int to_device, from_device, value; void (*call)(void *); void *data; } Op;
typedef struct { Op *ops; size_t count, room; } List;
typedef struct { List queue; List *capture; int spoiled; } Stream;
typedef struct Block { char *start; size_t size; int device; struct Block *next; } Block;

static Block *blocks;
static Stream *capturing;
static int current;

static void add(List *list, Op op) {
  if (list->count == list->room) list->ops = realloc(list->ops, (list->room = 2 * list->room + 8) * sizeof(Op));
  list->ops[list->count++] = op;
}

static int issue(Stream *stream, Op op) {
  if (!current) return NO_CONTEXT;
  add(stream->capture ? stream->capture : &stream->queue, op);
  return OK;
}

static int holds(const char *start, size_t size, int device) {
  for (Block *b = blocks; b; b = b->next)
    if (start >= b->start && start + size <= b->start + b->size) return b->device == device;
  return 0;
}

static int run(const Op *op) {
  size_t whole = op->count ? (op->count - 1) * op->pitch + op->size : 0;
  size_t source = op->count ? (op->count - 1) * op->from_pitch + op->size : 0;
  if (op->kind == CALL) { op->call(op->data); return OK; }
  if (!whole) return OK;
  if (!holds(op->to, whole, op->to_device)) return ILLEGAL_ADDRESS;
  if (op->kind == SET) { memset(op->to, op->value, op->size); return OK; }
  if (!holds(op->from, source, op->from_device)) return ILLEGAL_ADDRESS;
  for (size_t i = 0; i < op->count; i++) memmove(op->to + i * op->pitch, op->from + i * op->from_pitch, op->size);
  return OK;
}

/* What must not happen while a stream of this thread captures. */
static int unsafe(void) {
  if (capturing) capturing->spoiled = 1;
  return capturing ? CAPTURE_UNSUPPORTED : OK;
}

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "host", size); return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &current; return OK; }
int cuCtxSetCurrent(void *context) { current = context != 0; return OK; }
int cuGetErrorName(int error, const char **text) {
  *text = error == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        : error == CAPTURE_INVALIDATED ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        : error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
  return OK;
}
int cuGetErrorString(int error, const char **text) { *text = "told by the host's driver"; return OK; }

static int allocate(char **start, size_t size, int device) {
  if (!current) return NO_CONTEXT;
  if (unsafe()) return CAPTURE_UNSUPPORTED;
  Block *block = malloc(sizeof *block);
  *block = (Block){malloc(size), size, device, blocks};
  memset(block->start, 0xA5, size);
  blocks = block;
  *start = block->start;
  return OK;
}

static int release(const char *start) {
  if (unsafe()) return CAPTURE_UNSUPPORTED;
  for (Block **b = &blocks; *b; b = &(*b)->next)
    if ((*b)->start == start) {
      Block *dead = *b;
      *b = dead->next;
      memset(dead->start, 0x5A, dead->size);
      free(dead->start);
      free(dead);
      return OK;
    }
  return INVALID_VALUE;
}

int cuMemAlloc(uint64_t *address, size_t size) { return allocate((char **)address, size, 1); }
int cuMemFree(uint64_t address) { return release((char *)address); }
int cuMemHostAlloc(void **address, size_t size, unsigned flags) { return allocate((char **)address, size, 0); }
int cuMemFreeHost(void *address) { return release(address); }

int cuStreamCreate(Stream **stream, unsigned flags) { *stream = calloc(1, sizeof **stream); return OK; }
int cuStreamSynchronize(Stream *stream) {
  if (stream->capture) return unsafe();
  int error = OK;
  for (size_t i = 0; i < stream->queue.count && !error; i++) error = run(&stream->queue.ops[i]);
  stream->queue.count = 0;
  return error;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, Stream *stream) {
  return issue(stream, (Op){.kind = SET, .to = (char *)to, .size = size, .count = 1, .to_device = 1, .value = value});
}
static int copy(Stream *stream, void *to, int to_device, const void *from, int from_device, size_t size) {
  return issue(stream, (Op){.kind = COPY, .to = to, .from = from, .size = size, .count = 1, .to_device = to_device,
                            .from_device = from_device});
}
int cuMemcpyHtoDAsync(uint64_t to, void *from, size_t size, Stream *s) { return copy(s, (void *)to, 1, from, 0, size); }
int cuMemcpyDtoHAsync(void *to, uint64_t from, size_t size, Stream *s) { return copy(s, to, 0, (void *)from, 1, size); }
int cuMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t size, Stream *s) {
  return copy(s, (void *)to, 1, (void *)from, 1, size);
}
int cuMemcpy2DAsync(const Copy2D *c, Stream *stream) {
  if (c->stype != 2 || c->dtype != 2 || c->width > c->spitch || c->width > c->dpitch) return INVALID_VALUE;
  return issue(stream, (Op){.kind = COPY, .to = (char *)c->ddev, .from = (char *)c->sdev, .size = c->width,
                            .pitch = c->dpitch, .from_pitch = c->spitch, .count = c->height, .to_device = 1, .from_device = 1});
}
int cuLaunchHostFunc(Stream *stream, void (*call)(void *), void *data) {
  return issue(stream, (Op){.kind = CALL, .call = call, .data = data});
}

int cuStreamBeginCapture(Stream *stream, int mode) {
  if (stream->capture) return unsafe();
  stream->capture = calloc(1, sizeof(List));
  stream->spoiled = 0;
  capturing = stream;
  return OK;
}
int cuStreamEndCapture(Stream *stream, List **graph) {
  *graph = stream->spoiled ? 0 : stream->capture;
  stream->capture = 0;
  capturing = 0;
  return stream->spoiled ? CAPTURE_INVALIDATED : OK;
}
int cuGraphInstantiateWithFlags(List **executable, List *graph, unsigned long long flags) {
  *executable = calloc(1, sizeof(List));
  for (size_t i = 0; i < graph->count; i++) add(*executable, graph->ops[i]);
  return OK;
}
int cuGraphLaunch(List *graph, Stream *stream) {
  int error = OK;
  for (size_t i = 0; i < graph->count && !error; i++) error = issue(stream, graph->ops[i]);
  return error;
}
int cuGraphDestroy(List *graph) { free(graph->ops); free(graph); return OK; }
int cuGraphExecDestroy(List *graph) { return cuGraphDestroy(graph); }

#define NAMED(f) {#f, (void *)f}
static const struct { const char *name; void *call; } table[] = {
  NAMED(cuInit), NAMED(cuDriverGetVersion), NAMED(cuDeviceGetCount), NAMED(cuDeviceGet), NAMED(cuDeviceGetName),
  NAMED(cuDeviceGetAttribute), NAMED(cuDevicePrimaryCtxRetain), NAMED(cuCtxSetCurrent), NAMED(cuGetErrorName),
  NAMED(cuGetErrorString), NAMED(cuMemAlloc), NAMED(cuMemFree), NAMED(cuMemHostAlloc), NAMED(cuMemFreeHost),
  NAMED(cuStreamCreate), NAMED(cuStreamSynchronize), NAMED(cuMemsetD8Async), NAMED(cuMemcpyHtoDAsync),
  NAMED(cuMemcpyDtoHAsync), NAMED(cuMemcpyDtoDAsync), NAMED(cuMemcpy2DAsync), NAMED(cuLaunchHostFunc),
  NAMED(cuStreamBeginCapture), NAMED(cuStreamEndCapture), NAMED(cuGraphInstantiateWithFlags), NAMED(cuGraphLaunch),
  NAMED(cuGraphDestroy), NAMED(cuGraphExecDestroy)};

int cuGetProcAddress_v2(const char *name, void **call, int version, uint64_t flags, int *status) {
  *call = 0;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(table[i].name, name)) *call = table[i].call;
  return *call ? OK : NOT_FOUND;
}

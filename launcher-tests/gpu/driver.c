// Stands in for CUDA's driver (libcuda.so.1) on machines without a GPU, so that what is said to a device can be tested: memory of
// a device is memory of the process, a stream is a thread that does one thing after the other, an event is a number that a
// stream comes to. Kernels are those of kernels.cpp, by name, whatever module they are asked for in.
// Environment:
//   SIMULATED_GPUS=2             so many devices (1)
//   SIMULATED_GPU_BROKEN=1       from now on every event is an error, as after an illegal access
//   CUDA_VISIBLE_DEVICES=1,0     hides and orders them, by number
// Build: cc -shared -fPIC -pthread -o libcuda.so.1 driver.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
enum { DEVICES = 16 };

typedef struct item {
  void (*act)(void *);
  void *with;
  struct item *next;
} item;

typedef struct stream {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  item *first, *last;
  int busy, ends;
  pthread_t thread;
} stream;

typedef struct {
  int device, users;
  stream *usual;
} context;

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  unsigned long recorded, come;
} event;

static context contexts[DEVICES];
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local context *current;

// --- streams ---

static void *live(void *given) {
  stream *s = given;
  pthread_mutex_lock(&s->lock);
  for (;;) {
    while (!s->first && !s->ends) pthread_cond_wait(&s->changed, &s->lock);
    item *now = s->first;
    if (!now) break;
    s->first = now->next;
    if (!s->first) s->last = NULL;
    s->busy = 1;
    pthread_mutex_unlock(&s->lock);
    now->act(now->with);
    free(now);
    pthread_mutex_lock(&s->lock);
    s->busy = 0;
    pthread_cond_broadcast(&s->changed);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

static stream *begin(void) {
  stream *s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  pthread_create(&s->thread, NULL, live, s);
  return s;
}

static stream *stream_of(void *given) {
  if (given && given != (void *)1 && given != (void *)2) return given;
  pthread_mutex_lock(&contexts_lock);
  context *c = current ? current : &contexts[0];
  if (!c->usual) c->usual = begin();
  pthread_mutex_unlock(&contexts_lock);
  return c->usual;
}

// Also for what stands in for NCCL.
void simulated_enqueue(void *given, void (*act)(void *), void *with) {
  stream *s = stream_of(given);
  item *next = calloc(1, sizeof *next);
  next->act = act;
  next->with = with;
  pthread_mutex_lock(&s->lock);
  if (s->last) s->last->next = next; else s->first = next;
  s->last = next;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

int simulated_device(void) { return current ? current->device : -1; }

// The threads that free a communicator of NCCL. The real driver frees at exit what they use.
static atomic_int freeing;

void simulated_freeing(int change) { atomic_fetch_add(&freeing, change); }

static void end_of_process(void) {
  if (!atomic_load(&freeing)) return;
  signal(SIGSEGV, SIG_DFL);
  raise(SIGSEGV);
}

int cuStreamCreate(void **into, unsigned flags) {
  (void)flags;
  *into = begin();
  return SUCCESS;
}

int cuStreamCreateWithPriority(void **into, unsigned flags, int priority) {
  (void)priority;
  return cuStreamCreate(into, flags);
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = *greatest = 0;
  return SUCCESS;
}

int cuStreamDestroy_v2(void *given) {
  stream *s = given;
  pthread_mutex_lock(&s->lock);
  s->ends = 1;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
  // It does what it has to do, without anybody waiting.
  pthread_detach(s->thread);
  return SUCCESS;
}

int cuStreamSynchronize(void *given) {
  stream *s = stream_of(given);
  pthread_mutex_lock(&s->lock);
  while (s->first || s->busy) pthread_cond_wait(&s->changed, &s->lock);
  pthread_mutex_unlock(&s->lock);
  return SUCCESS;
}

int cuStreamQuery(void *given) {
  stream *s = stream_of(given);
  pthread_mutex_lock(&s->lock);
  int idle = !s->first && !s->busy;
  pthread_mutex_unlock(&s->lock);
  return idle ? SUCCESS : NOT_READY;
}

int cuStreamIsCapturing(void *given, int *status) {
  (void)given;
  *status = 0;
  return SUCCESS;
}

// Nothing is ever captured here.
int cuThreadExchangeStreamCaptureMode(int *mode) {
  if (!current) return INVALID_CONTEXT;
  static _Thread_local int ours;
  int before = ours;
  ours = *mode;
  *mode = before;
  return SUCCESS;
}

// --- events ---

typedef struct {
  event *of;
  unsigned long number;
} moment;

static void come(void *given) {
  moment *m = given;
  pthread_mutex_lock(&m->of->lock);
  if (m->of->come < m->number) m->of->come = m->number;
  pthread_cond_broadcast(&m->of->changed);
  pthread_mutex_unlock(&m->of->lock);
  free(m);
}

static void await(void *given) {
  moment *m = given;
  pthread_mutex_lock(&m->of->lock);
  while (m->of->come < m->number) pthread_cond_wait(&m->of->changed, &m->of->lock);
  pthread_mutex_unlock(&m->of->lock);
  free(m);
}

static int is_broken(void) { return getenv("SIMULATED_GPU_BROKEN") != NULL; }

int cuEventCreate(void **into, unsigned flags) {
  (void)flags;
  event *e = calloc(1, sizeof *e);
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->changed, NULL);
  *into = e;
  return SUCCESS;
}

// Streams may still come to it: it stays.
int cuEventDestroy_v2(void *given) {
  (void)given;
  return SUCCESS;
}

int cuEventRecord(void *given, void *on) {
  moment *m = malloc(sizeof *m);
  m->of = given;
  pthread_mutex_lock(&m->of->lock);
  m->number = ++m->of->recorded;
  pthread_mutex_unlock(&m->of->lock);
  simulated_enqueue(on, come, m);
  return SUCCESS;
}

int cuStreamWaitEvent(void *on, void *given, unsigned flags) {
  (void)flags;
  moment *m = malloc(sizeof *m);
  m->of = given;
  pthread_mutex_lock(&m->of->lock);
  m->number = m->of->recorded;
  pthread_mutex_unlock(&m->of->lock);
  simulated_enqueue(on, await, m);
  return SUCCESS;
}

int cuEventQuery(void *given) {
  event *e = given;
  if (!current) return INVALID_CONTEXT;
  if (is_broken()) return ILLEGAL_ADDRESS;
  pthread_mutex_lock(&e->lock);
  int over = e->come >= e->recorded;
  pthread_mutex_unlock(&e->lock);
  return over ? SUCCESS : NOT_READY;
}

int cuEventSynchronize(void *given) {
  event *e = given;
  pthread_mutex_lock(&e->lock);
  while (e->come < e->recorded) pthread_cond_wait(&e->changed, &e->lock);
  pthread_mutex_unlock(&e->lock);
  return SUCCESS;
}

int cuEventElapsedTime(float *into, void *from, void *to) {
  (void)from, (void)to;
  *into = 1;
  return SUCCESS;
}

int cuEventElapsedTime_v2(float *into, void *from, void *to) { return cuEventElapsedTime(into, from, to); }

// --- memory ---

typedef struct {
  void *to;
  const void *from;
  size_t bytes;
  int value;
} move;

static void copy(void *given) {
  move *m = given;
  memmove(m->to, m->from, m->bytes);
  free(m);
}

static void fill(void *given) {
  move *m = given;
  memset(m->to, m->value, m->bytes);
  free(m);
}

static int moved(void *on, void (*act)(void *), move given) {
  move *m = malloc(sizeof *m);
  *m = given;
  simulated_enqueue(on, act, m);
  return SUCCESS;
}

int cuMemAlloc_v2(unsigned long long *into, size_t bytes) {
  void *memory = bytes > (1UL << 40) ? NULL : aligned_alloc(256, (bytes + 255) & ~(size_t)255);
  *into = (unsigned long long)memory;
  return memory ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemAllocAsync(unsigned long long *into, size_t bytes, void *on) {
  (void)on;
  return cuMemAlloc_v2(into, bytes);
}

int cuMemFree_v2(unsigned long long at) {
  free((void *)at);
  return SUCCESS;
}

int cuMemFreeAsync(unsigned long long at, void *on) {
  simulated_enqueue(on, free, (void *)at);
  return SUCCESS;
}

// --- pinned memory ---

typedef struct pinned {
  char *start;
  size_t bytes;
  struct pinned *next;
} pinned;

static pinned *pins;
static pthread_mutex_t pins_lock = PTHREAD_MUTEX_INITIALIZER;

int cuMemHostAlloc(void **into, size_t bytes, unsigned flags) {
  (void)flags;
  *into = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
  if (!*into) return OUT_OF_MEMORY;
  pinned *p = malloc(sizeof *p);
  pthread_mutex_lock(&pins_lock);
  *p = (pinned){*into, bytes, pins};
  pins = p;
  pthread_mutex_unlock(&pins_lock);
  return SUCCESS;
}

int cuMemFreeHost(void *at) {
  pthread_mutex_lock(&pins_lock);
  for (pinned **p = &pins; *p; p = &(*p)->next) {
    if ((*p)->start != at) continue;
    pinned *gone = *p;
    *p = gone->next;
    free(gone);
    break;
  }
  pthread_mutex_unlock(&pins_lock);
  free(at);
  return SUCCESS;
}

static int is_pinned(const void *at) {
  int found = 0;
  pthread_mutex_lock(&pins_lock);
  for (pinned *p = pins; p; p = p->next) found |= (char *)at >= p->start && (char *)at < p->start + p->bytes;
  pthread_mutex_unlock(&pins_lock);
  return found;
}

// Of memory that is not pinned the host's part is over when the call returns.
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *on) {
  moved(on, copy, (move){(void *)to, from, bytes, 0});
  return is_pinned(from) ? SUCCESS : cuStreamSynchronize(on);
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *on) {
  moved(on, copy, (move){to, (void *)from, bytes, 0});
  return is_pinned(to) ? SUCCESS : cuStreamSynchronize(on);
}

int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *on) {
  return moved(on, copy, (move){(void *)to, (void *)from, bytes, 0});
}

int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t bytes, void *on) {
  return moved(on, fill, (move){(void *)at, NULL, bytes, value});
}

int cuMemGetInfo_v2(size_t *unused, size_t *all) {
  *all = 16UL << 30;
  *unused = 8UL << 30;
  return SUCCESS;
}

// --- kernels ---

typedef struct {
  void *bound;
  unsigned blocks, threads;
} launch;

// Kernels that have not ended.
static atomic_int launched;

// A function of libsimulated-kernels.so, which lies beside this library.
static void *of_kernels(const char *name) {
  static void *library;
  if (!library) {
    Dl_info here;
    char path[4096];
    if (!dladdr(&contexts, &here)) return NULL;
    const char *end = strrchr(here.dli_fname, '/');
    int folder = end ? (int)(end - here.dli_fname) + 1 : 0;
    snprintf(path, sizeof path, "%.*slibsimulated-kernels.so", folder, here.dli_fname);
    library = dlopen(path, RTLD_NOW);
  }
  return library ? dlsym(library, name) : NULL;
}

static void run(void *given) {
  launch *l = given;
  ((void (*)(void *, unsigned, unsigned))of_kernels("simulated_run"))(l->bound, l->blocks, l->threads);
  atomic_fetch_sub(&launched, 1);
  free(l);
}

int cuModuleLoadData(void **into, const void *image) {
  (void)image;
  *into = contexts;
  return SUCCESS;
}

// As the real one: it waits for the kernels.
int cuModuleUnload(void *module) {
  (void)module;
  struct timespec moment = {0, 20000};
  while (atomic_load(&launched)) nanosleep(&moment, NULL);
  return SUCCESS;
}

int cuModuleGetFunction(void **into, void *module, const char *name) {
  (void)module;
  void *(*find)(const char *) = (void *(*)(const char *))of_kernels("simulated_kernel");
  *into = find ? find(name) : NULL;
  return *into ? SUCCESS : NOT_FOUND;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *on, void **arguments, void **extra) {
  (void)shared, (void)extra;
  if (!gx || !bx || gy != 1 || gz != 1 || by != 1 || bz != 1 || bx > 1024) return INVALID_VALUE;
  launch *l = malloc(sizeof *l);
  void *bound = ((void *(*)(void *, void **))of_kernels("simulated_bind"))(function, arguments);
  *l = (launch){bound, gx, bx};
  atomic_fetch_add(&launched, 1);
  simulated_enqueue(on, run, l);
  return SUCCESS;
}

// --- devices ---

// Which devices the process may see.
static int visible(int *into) {
  const char *given = getenv("SIMULATED_GPUS"), *shown = getenv("CUDA_VISIBLE_DEVICES");
  int all = given ? atoi(given) : 1, count = 0;
  if (all > DEVICES) all = DEVICES;
  if (!shown) {
    for (; count < all; count++) into[count] = count;
    return count;
  }
  char *text = strdup(shown), *rest = text, *word;
  while ((word = strsep(&rest, ",")) && count < DEVICES) {
    int device;
    // As CUDA: by number or by the name that NVML tells, and what comes behind one that is not there is hidden.
    if (sscanf(word, "GPU-00000000-0000-0000-0000-%12x", &device) != 1) {
      char *end;
      device = (int)strtol(word, &end, 10);
      if (end == word) break;
    }
    if (device < 0 || device >= all) break;
    into[count++] = device;
  }
  free(text);
  return count;
}

int cuInit(unsigned flags) {
  (void)flags;
  static atomic_int registered;
  if (!atomic_exchange(&registered, 1)) atexit(end_of_process);
  int seen[DEVICES];
  return visible(seen) ? SUCCESS : NO_DEVICE;
}

int cuDriverGetVersion(int *into) {
  *into = 12080;
  return SUCCESS;
}

int cuDeviceGetCount(int *into) {
  int seen[DEVICES];
  *into = visible(seen);
  return SUCCESS;
}

int cuDeviceGet(int *into, int ordinal) {
  int seen[DEVICES];
  if (ordinal < 0 || ordinal >= visible(seen)) return INVALID_DEVICE;
  *into = seen[ordinal];
  return SUCCESS;
}

int cuDeviceGetAttribute(int *into, int attribute, int device) {
  (void)device;
  // CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
  *into = attribute == 115;
  return SUCCESS;
}

int cuDeviceGetName(char *into, int length, int device) {
  snprintf(into, (size_t)length, "simulated GPU %d", device);
  return SUCCESS;
}

int cuDeviceGetUuid(unsigned char into[16], int device) {
  memset(into, 0, 16);
  into[15] = (unsigned char)device;
  return SUCCESS;
}

int cuDeviceGetUuid_v2(unsigned char into[16], int device) { return cuDeviceGetUuid(into, device); }

int cuDeviceTotalMem_v2(size_t *into, int device) {
  (void)device;
  *into = 16UL << 30;
  return SUCCESS;
}

int cuDeviceGetPCIBusId(char *into, int length, int device) {
  snprintf(into, (size_t)length, "0000:%02x:00.0", device + 1);
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **into, int device) {
  contexts[device].device = device;
  contexts[device].users++;
  *into = &contexts[device];
  return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  contexts[device].users--;
  return SUCCESS;
}

int cuCtxGetCurrent(void **into) {
  *into = current;
  return SUCCESS;
}

int cuCtxSetCurrent(void *given) {
  current = given;
  return SUCCESS;
}

int cuCtxSynchronize(void) { return current ? SUCCESS : INVALID_CONTEXT; }

static const char *name_of(int result) {
  switch (result) {
    case SUCCESS: return "CUDA_SUCCESS";
    case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case NO_DEVICE: return "CUDA_ERROR_NO_DEVICE";
    case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
    case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case NOT_READY: return "CUDA_ERROR_NOT_READY";
    case ILLEGAL_ADDRESS: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    default: return NULL;
  }
}

int cuGetErrorName(int result, const char **into) {
  *into = name_of(result);
  return *into ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorString(int result, const char **into) {
  *into = result == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : name_of(result);
  return *into ? SUCCESS : INVALID_VALUE;
}

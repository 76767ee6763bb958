// Stands in for NCCL (libnccl.so.2) on machines without a GPU, beside driver.c: ranks are threads or processes of one host that
// find each other through files in a folder. What it does, it does as NCCL is documented to: calls return before they are
// carried out, an absent rank leaves a group forming for ever, an abort frees streams, groups of calls go side by side.
// Environment:
//   SIMULATED_NCCL_DIR=...       folder for the files (/tmp)
//   SIMULATED_NCCL_VERSION=23007 what it says is its version
//   SIMULATED_NCCL_FAIL=name     that function fails, such as ncclAllReduce
//   SIMULATED_NCCL_ABSENT=1      this rank never comes to a group that forms
//   SIMULATED_NCCL_DESTROY_MS=n  ncclCommDestroy takes at least so long
//   SIMULATED_NCCL_SICK=n        after so many operations ncclCommGetAsyncError tells of an error
// Build: cc -shared -fPIC -pthread -o libnccl.so.2 nccl.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { RANKS = 16, PART = 64 << 10 };
enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, F8A, F8B };

typedef struct { char internal[128]; } unique_id;

typedef struct {
  atomic_int full;
  size_t bytes;
  char data[PART];
} box;

// What the ranks of a group share: a file.
typedef struct {
  atomic_int come, left;
  atomic_int arrived, turn;
  int colors[RANKS], keys[RANKS], devices[RANKS];
  char data[RANKS][PART];
  box boxes[RANKS][RANKS];
} meeting;

typedef struct comm {
  meeting *with;
  char path[128];
  int rank, size, splits;
  atomic_int state, aborted, begun, carried_out, formed;
  float factors[64];
  double factors64[64];
  int made;
} comm;

typedef struct op {
  int kind, type, operation, root;
  double factor;
  const void *send;
  void *recv;
  size_t count;
  struct comm *comm;
  void *stream;
  struct op *next;
} op;

static _Thread_local int depth;
static _Thread_local op *queued, *queued_last;
static _Thread_local char said[256];

static void nap(void) {
  struct timespec moment = {0, 20000};
  nanosleep(&moment, NULL);
}

static int fails(const char *name) {
  const char *chosen = getenv("SIMULATED_NCCL_FAIL");
  if (!chosen || strcmp(chosen, name)) return 0;
  snprintf(said, sizeof said, "%s was told to fail", name);
  return 1;
}

static void (*enqueue(void))(void *, void (*)(void *), void *) {
  static void (*found)(void *, void (*)(void *), void *);
  if (!found) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    found = driver ? (void (*)(void *, void (*)(void *), void *))dlsym(driver, "simulated_enqueue") : NULL;
  }
  return found;
}

static int device(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  int (*of)(void) = driver ? (int (*)(void))dlsym(driver, "simulated_device") : NULL;
  return of ? of() : -1;
}

static size_t bytes_of(int type) {
  switch (type) {
    case I8: case U8: case F8A: case F8B: return 1;
    case F16: case BF16: return 2;
    case I32: case U32: case F32: return 4;
    default: return 8;
  }
}

// --- meeting ---

// Whether all ranks have come to this point; not if the group was aborted here.
static int barrier(comm *c) {
  meeting *m = c->with;
  int turn = atomic_load(&m->turn);
  if (atomic_fetch_add(&m->arrived, 1) + 1 == c->size) {
    atomic_store(&m->arrived, 0);
    atomic_fetch_add(&m->turn, 1);
    return 1;
  }
  while (atomic_load(&m->turn) == turn) {
    if (atomic_load(&c->aborted)) return 0;
    nap();
  }
  return 1;
}

static int map(comm *c) {
  int file = open(c->path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(meeting))) return SYSTEM_ERROR;
  c->with = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return c->with == MAP_FAILED ? SYSTEM_ERROR : SUCCESS;
}

static void *form(void *given) {
  comm *c = given;
  if (getenv("SIMULATED_NCCL_ABSENT")) return NULL;
  atomic_fetch_add(&c->with->come, 1);
  while (atomic_load(&c->with->come) < c->size) {
    if (atomic_load(&c->aborted)) return NULL;
    nap();
  }
  if (!barrier(c)) return NULL;
  if (c->rank == 0) unlink(c->path);
  atomic_store(&c->formed, 1);
  atomic_store(&c->state, SUCCESS);
  return NULL;
}

static void *forget(comm *c) {
  if (c->rank == 0) unlink(c->path);
  return NULL;
}

static void start(void *(*act)(void *), void *with) {
  pthread_t thread;
  pthread_create(&thread, NULL, act, with);
  pthread_detach(thread);
}

int ncclGetVersion(int *into) {
  const char *chosen = getenv("SIMULATED_NCCL_VERSION");
  *into = chosen ? atoi(chosen) : 23007;
  return SUCCESS;
}

int ncclGetUniqueId(unique_id *into) {
  static atomic_int drawn;
  if (fails("ncclGetUniqueId")) return SYSTEM_ERROR;
  const char *folder = getenv("SIMULATED_NCCL_DIR");
  memset(into, 0, sizeof *into);
  snprintf(into->internal, sizeof into->internal, "%.60s/simulated-nccl-%d-%d", folder ? folder : "/tmp", getpid(),
           atomic_fetch_add(&drawn, 1));
  return SUCCESS;
}

static comm *made(const char *path, int size, int rank) {
  comm *c = calloc(1, sizeof *c);
  snprintf(c->path, sizeof c->path, "%s", path);
  c->rank = rank;
  c->size = size;
  atomic_store(&c->state, IN_PROGRESS);
  return c;
}

typedef struct { size_t size; unsigned magic, version; int blocking; } config;

int ncclCommInitRankConfig(comm **into, int size, unique_id id, int rank, const config *how) {
  if (fails("ncclCommInitRankConfig")) return SYSTEM_ERROR;
  if (!how || how->magic != 0xcafebeef || how->blocking || size > RANKS || rank < 0 || rank >= size || device() < 0)
    return INVALID_ARGUMENT;
  comm *c = made(id.internal, size, rank);
  if (map(c)) return SYSTEM_ERROR;
  *into = c;
  start(form, c);
  return IN_PROGRESS;
}

int ncclCommInitRank(comm **into, int size, unique_id id, int rank) {
  if (size > RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  comm *c = made(id.internal, size, rank);
  if (map(c)) return SYSTEM_ERROR;
  *into = c;
  form(c);
  return SUCCESS;
}

int ncclCommGetAsyncError(comm *c, int *into) {
  const char *sick = getenv("SIMULATED_NCCL_SICK");
  *into = atomic_load(&c->state);
  if (sick && atomic_load(&c->carried_out) >= atoi(sick)) {
    snprintf(said, sizeof said, "a network card is gone");
    *into = REMOTE_ERROR;
  }
  return SUCCESS;
}

typedef struct {
  comm *parent, **into;
  int color, key, number;
} splitting;

static void *split(void *given) {
  splitting *s = given;
  comm *p = s->parent;
  p->with->colors[p->rank] = s->color;
  p->with->keys[p->rank] = s->key;
  if (!barrier(p)) return NULL;
  int size = 0, rank = 0;
  for (int other = 0; other < p->size; other++) {
    if (p->with->colors[other] != s->color) continue;
    size++;
    int theirs = p->with->keys[other];
    rank += theirs < s->key || (theirs == s->key && other < p->rank);
  }
  if (s->color >= 0) {
    char path[160];
    snprintf(path, sizeof path, "%.100s.%d.%d", p->path, s->number, s->color);
    comm *c = made(path, size, rank);
    if (map(c)) return NULL;
    *s->into = c;
    start(form, c);
  }
  if (!barrier(p)) return NULL;
  atomic_store(&p->state, SUCCESS);
  free(s);
  return NULL;
}

int ncclCommSplit(comm *parent, int color, int key, comm **into, const config *how) {
  if (fails("ncclCommSplit")) return SYSTEM_ERROR;
  if (!how || how->magic != 0xcafebeef) return INVALID_ARGUMENT;
  // The real one may wait for ever then.
  if (atomic_load(&parent->begun) != atomic_load(&parent->carried_out)) {
    snprintf(said, sizeof said, "operations are under way");
    return INVALID_USAGE;
  }
  splitting *s = calloc(1, sizeof *s);
  *s = (splitting){parent, into, color, key, parent->splits++};
  atomic_store(&parent->state, IN_PROGRESS);
  start(split, s);
  // As the real one: only ncclCommGetAsyncError tells when it is done.
  return SUCCESS;
}

int ncclCommFinalize(comm *c) {
  (void)c;
  return SUCCESS;
}

// Streams may still come to it: it stays. As the real one, which waits for the connections inside a host to close: for all ranks.
static int destroy(comm *c) {
  const char *time = getenv("SIMULATED_NCCL_DESTROY_MS");
  if (time) usleep((useconds_t)atoi(time) * 1000);
  forget(c);
  atomic_fetch_add(&c->with->left, 1);
  while (atomic_load(&c->formed) && atomic_load(&c->with->left) < c->size) nap();
  return SUCCESS;
}

int ncclCommDestroy(comm *c) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void (*freeing)(int) = driver ? (void (*)(int))dlsym(driver, "simulated_freeing") : NULL;
  if (freeing) freeing(1);
  int result = destroy(c);
  if (freeing) freeing(-1);
  return result;
}

int ncclCommAbort(comm *c) {
  atomic_store(&c->aborted, 1);
  forget(c);
  atomic_fetch_add(&c->with->left, 1);
  return SUCCESS;
}

int ncclCommRegister(comm *c, void *at, size_t bytes, void **into) {
  if (fails("ncclCommRegister")) return SYSTEM_ERROR;
  (void)c, (void)bytes;
  *into = at;
  return SUCCESS;
}

int ncclCommDeregister(comm *c, void *handle) {
  (void)c, (void)handle;
  return SUCCESS;
}

const char *ncclGetErrorString(int result) {
  switch (result) {
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}

const char *ncclGetLastError(comm *c) {
  (void)c;
  return said;
}

// --- arithmetic ---

static float half(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent ? (float)(mantissa + 1024) * __builtin_ldexpf(1, exponent - 25) : (float)mantissa * __builtin_ldexpf(1, -24);
  return bits >> 15 ? -value : value;
}

static uint16_t halved(float value) {
  uint16_t best = 0;
  // Slow and right: whichever is nearest.
  float least = 1e30f;
  for (unsigned bits = 0; bits < 0x7C00; bits++) {
    float off = __builtin_fabsf(half((uint16_t)bits) - __builtin_fabsf(value));
    if (off < least) least = off, best = (uint16_t)bits;
    if (half((uint16_t)bits) > __builtin_fabsf(value)) break;
  }
  return (uint16_t)(best | (value < 0 ? 0x8000 : 0));
}

static double get(int type, const char *at, size_t i) {
  uint32_t wide;
  float value;
  switch (type) {
    case I8: return ((int8_t *)at)[i];
    case U8: case F8A: case F8B: return ((uint8_t *)at)[i];
    case I32: return ((int32_t *)at)[i];
    case U32: return ((uint32_t *)at)[i];
    case I64: return (double)((int64_t *)at)[i];
    case U64: return (double)((uint64_t *)at)[i];
    case F16: return half(((uint16_t *)at)[i]);
    case F32: return ((float *)at)[i];
    case F64: return ((double *)at)[i];
    default:
      wide = (uint32_t)((uint16_t *)at)[i] << 16;
      memcpy(&value, &wide, 4);
      return value;
  }
}

static void set(int type, char *at, size_t i, double value) {
  float narrow = (float)value;
  uint32_t bits;
  switch (type) {
    case I8: ((int8_t *)at)[i] = (int8_t)value; break;
    case U8: case F8A: case F8B: ((uint8_t *)at)[i] = (uint8_t)value; break;
    case I32: ((int32_t *)at)[i] = (int32_t)value; break;
    case U32: ((uint32_t *)at)[i] = (uint32_t)value; break;
    case I64: ((int64_t *)at)[i] = (int64_t)value; break;
    case U64: ((uint64_t *)at)[i] = (uint64_t)value; break;
    case F16: ((uint16_t *)at)[i] = halved(narrow); break;
    case F32: ((float *)at)[i] = narrow; break;
    case F64: ((double *)at)[i] = value; break;
    default:
      memcpy(&bits, &narrow, 4);
      bits += 0x7FFF + (bits >> 16 & 1);
      ((uint16_t *)at)[i] = (uint16_t)(bits >> 16);
  }
}

enum { SUM, PRODUCT, MAX, MIN, AVG, FIRST_OWN };

static void reduce(const op *o, char *into, size_t count) {
  comm *c = o->comm;
  for (size_t i = 0; i < count; i++) {
    double value = get(o->type, c->with->data[0], i);
    for (int rank = 1; rank < c->size; rank++) {
      double other = get(o->type, c->with->data[rank], i);
      switch (o->operation) {
        case PRODUCT: value *= other; break;
        case MAX: value = other > value ? other : value; break;
        case MIN: value = other < value ? other : value; break;
        default: value += other;
      }
    }
    set(o->type, into, i, o->operation == AVG ? value / c->size : value);
  }
}

// --- operations ---

// `count` elements from `send` of all ranks become those at `recv` where this rank gets any.
static int piece(const op *o, const char *send, char *recv, size_t count) {
  comm *c = o->comm;
  size_t size = bytes_of(o->type);
  if (send) memcpy(c->with->data[c->rank], send, count * size);
  if (send && o->operation >= FIRST_OWN)
    for (size_t i = 0; i < count; i++) set(o->type, c->with->data[c->rank], i, get(o->type, send, i) * o->factor);
  if (!barrier(c)) return 0;
  if (recv && o->kind == BROADCAST) memcpy(recv, c->with->data[o->root], count * size);
  else if (recv && o->kind != ALL_GATHER) reduce(o, recv, count);
  else if (recv)
    for (int rank = 0; rank < c->size; rank++)
      memcpy(recv + (size_t)rank * o->count * size, c->with->data[rank], count * size);
  return barrier(c);
}

static int collective(const op *o) {
  comm *c = o->comm;
  size_t size = bytes_of(o->type), most = PART / size;
  const char *send = o->send;
  char *recv = o->recv;
  int blocks = o->kind == REDUCE_SCATTER ? c->size : 1;
  int gives = o->kind != BROADCAST || c->rank == o->root, gets = o->kind != REDUCE || c->rank == o->root;
  for (int block = 0; block < blocks; block++) {
    for (size_t at = 0; at < o->count; at += most) {
      size_t count = o->count - at < most ? o->count - at : most;
      int here = gets && (o->kind != REDUCE_SCATTER || block == c->rank);
      const char *from = send + ((size_t)block * o->count + at) * size;
      if (!piece(o, gives ? from : NULL, here ? recv + at * size : NULL, count)) return 0;
    }
  }
  return 1;
}

// A part of a message, if it can go now; bytes that went.
static size_t part(const op *o, size_t done) {
  comm *c = o->comm;
  size_t left = o->count * bytes_of(o->type) - done, now = left < PART ? left : PART;
  box *b = o->kind == SEND ? &c->with->boxes[c->rank][o->root] : &c->with->boxes[o->root][c->rank];
  if (atomic_load(&b->full) != (o->kind == RECV)) return 0;
  if (o->kind == SEND) {
    memcpy(b->data, (const char *)o->send + done, now);
  } else {
    memcpy((char *)o->recv + done, b->data, now);
  }
  atomic_store(&b->full, o->kind == SEND);
  return now;
}

static void messages(op *first) {
  enum { MOST = 64 };
  size_t done[MOST] = {0};
  for (int more = 1; more;) {
    more = 0;
    int index = 0, moved = 0;
    for (op *o = first; o && index < MOST; o = o->next, index++) {
      if (o->kind < SEND || done[index] == o->count * bytes_of(o->type)) continue;
      // Those of one pair go in order.
      int before = 0, other = 0;
      for (op *p = first; p != o; p = p->next, other++)
        before |= p->kind == o->kind && p->root == o->root && done[other] < p->count * bytes_of(p->type);
      more = 1;
      size_t now = before ? 0 : part(o, done[index]);
      done[index] += now;
      moved |= now > 0;
    }
    if (more && atomic_load(&first->comm->aborted)) return;
    if (more && !moved) nap();
  }
}

static void carry_out(void *given) {
  op *first = given;
  messages(first);
  for (op *o = first; o; o = o->next)
    if (o->kind < SEND && !collective(o)) break;
  atomic_fetch_add(&first->comm->carried_out, 1);
  while (first) {
    op *next = first->next;
    free(first);
    first = next;
  }
}

// As the real one before 2.24: a message alone is said to be done while a thread still connects and enqueues it.
static void *late(void *given) {
  op *first = given;
  comm *c = first->comm;
  for (int i = 0; i < 20; i++) nap();
  enqueue()(first->stream, carry_out, first);
  atomic_store(&c->state, SUCCESS);
  return NULL;
}

static int launch(void) {
  op *first = queued;
  queued = queued_last = NULL;
  if (!first) return SUCCESS;
  if (!enqueue()) return SYSTEM_ERROR;
  atomic_fetch_add(&first->comm->begun, 1);
  if (first->kind >= SEND && !first->next) {
    atomic_store(&first->comm->state, IN_PROGRESS);
    start(late, first);
    return SUCCESS;
  }
  // As where connections are made first: it is enqueued, and says so only when asked.
  enqueue()(first->stream, carry_out, first);
  return SUCCESS;
}

static int add(op given) {
  if (atomic_load(&given.comm->state) != SUCCESS) return INVALID_USAGE;
  if (given.operation >= FIRST_OWN) given.factor = given.comm->factors64[(given.operation - FIRST_OWN) % 64];
  op *o = malloc(sizeof *o);
  *o = given;
  if (queued_last) queued_last->next = o; else queued = o;
  queued_last = o;
  return depth ? SUCCESS : launch();
}

int ncclGroupStart(void) {
  depth++;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  if (fails("ncclGroupEnd")) return SYSTEM_ERROR;
  return --depth ? SUCCESS : launch();
}

int ncclRedOpCreatePreMulSum(int *into, void *factor, int type, int residence, comm *c) {
  if (residence != 1) return INVALID_ARGUMENT;
  int number = c->made++;
  c->factors64[number % 64] = get(type, factor, 0);
  *into = FIRST_OWN + number % 64;
  return SUCCESS;
}

int ncclRedOpDestroy(int operation, comm *c) {
  (void)operation, (void)c;
  return SUCCESS;
}

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int operation, comm *c, void *stream) {
  if (fails("ncclAllReduce")) return SYSTEM_ERROR;
  return add((op){.kind = ALL_REDUCE, .type = type, .operation = operation, .send = send, .recv = recv, .count = count, .comm = c, .stream = stream});
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, comm *c, void *stream) {
  return add((op){.kind = ALL_GATHER, .type = type, .send = send, .recv = recv, .count = count, .comm = c, .stream = stream});
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, comm *c, void *stream) {
  return add((op){.kind = BROADCAST, .type = type, .root = root, .send = send, .recv = recv, .count = count, .comm = c, .stream = stream});
}

int ncclReduce(const void *send, void *recv, size_t count, int type, int operation, int root, comm *c, void *stream) {
  return add((op){.kind = REDUCE, .type = type, .operation = operation, .root = root, .send = send, .recv = recv, .count = count, .comm = c, .stream = stream});
}

int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int operation, comm *c, void *stream) {
  return add((op){.kind = REDUCE_SCATTER, .type = type, .operation = operation, .send = send, .recv = recv, .count = count, .comm = c, .stream = stream});
}

int ncclSend(const void *send, size_t count, int type, int to, comm *c, void *stream) {
  return add((op){.kind = SEND, .type = type, .root = to, .send = send, .count = count, .comm = c, .stream = stream});
}

int ncclRecv(void *recv, size_t count, int type, int from, comm *c, void *stream) {
  return add((op){.kind = RECV, .type = type, .root = from, .recv = recv, .count = count, .comm = c, .stream = stream});
}

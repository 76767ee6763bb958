/* How fast any store server can release N clients that wait for one key: no protocol, no look-up, no event
 * loop, just one byte sent to each of N loopback TCP connections, with a reader in C on the other side.
 *
 *   cc -O2 -pthread -o release release.c && unshare -n sh -c 'ip link set lo up && ./release [N]'
 *
 * Prints the median of 9 releases, in ms, from the first send to the last byte read: with the sender on core 0
 * and the reader on core 1, and with 2 senders that may run anywhere. Needs N + 20 descriptors. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 9, SENDERS = 2 };
static int count, *served;
static struct shared { _Atomic int waiting; double done; } *shared;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void check(int ok, const char *what) {
  if (!ok) { perror(what); exit(1); }
}

static void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < CPU_SETSIZE; i++) if (core < 0 || i == core) CPU_SET(i, &set);
  sched_setaffinity(0, sizeof set, &set);
}

/* The clients: connects them all, then reads one byte from each, twice ROUNDS times. */
static void reader(struct sockaddr_in address) {
  int poll = epoll_create1(0);
  for (int i = 0; i < count; i++) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(fd >= 0 && !connect(fd, (void *)&address, sizeof address), "connect");
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    check(!epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
  }
  for (int round = 0; round < 2 * ROUNDS; round++) {
    pin(round < ROUNDS ? 1 : -1);
    shared->waiting = 1;
    for (int left = count; left > 0;) {
      struct epoll_event events[512];
      char byte;
      int ready = epoll_wait(poll, events, 512, 10000);
      check(ready > 0, "no byte within 10 s");
      for (int i = 0; i < ready; i++) left -= read(events[i].data.fd, &byte, 1) == 1;
    }
    shared->done = now();
    shared->waiting = 2;
    while (shared->waiting == 2) usleep(100);
  }
  exit(0);
}

static void *sender(void *which) {
  for (long i = (long)which; i < count; i += SENDERS) check(send(served[i], "x", 1, 0) == 1, "send");
  return NULL;
}

static int by_value(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

int main(int argc, char **argv) {
  count = argc > 1 ? atoi(argv[1]) : 10000;
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  served = calloc(count, sizeof *served);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  check(!bind(listener, (void *)&address, length) && !listen(listener, 4096), "listen");
  getsockname(listener, (void *)&address, &length);
  pid_t child = fork();
  if (!child) reader(address);
  for (int i = 0; i < count; i++) {
    served[i] = accept(listener, NULL, NULL);
    check(served[i] >= 0 && !setsockopt(served[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), "accept");
  }
  double took[2 * ROUNDS];
  for (int round = 0; round < 2 * ROUNDS; round++) {
    pin(round < ROUNDS ? 0 : -1);
    while (shared->waiting != 1) usleep(100);
    usleep(20000);  // the reader sleeps in epoll_wait by then
    double start = now();
    pthread_t threads[SENDERS];
    if (round < ROUNDS) {
      for (int i = 0; i < count; i++) check(send(served[i], "x", 1, 0) == 1, "send");
    } else {
      for (long i = 0; i < SENDERS; i++) pthread_create(&threads[i], NULL, sender, (void *)i);
      for (int i = 0; i < SENDERS; i++) pthread_join(threads[i], NULL);
    }
    while (shared->waiting != 2) usleep(100);
    took[round] = shared->done - start;
    shared->waiting = 0;
  }
  waitpid(child, NULL, 0);
  qsort(took, ROUNDS, sizeof *took, by_value);
  qsort(took + ROUNDS, ROUNDS, sizeof *took, by_value);
  printf("release of %d, median ms: one sender, pinned %.1f; %d senders, free %.1f\n", count, took[ROUNDS / 2], SENDERS,
         took[ROUNDS + ROUNDS / 2]);
  return 0;
}

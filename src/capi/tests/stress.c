/* Threads of each rank use their own groups and one group together, at the same time. */
#include <convoke.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            const char *why = cvk_error_message();                                                           \
            fprintf(stderr, "%s:%d: %s is false; %s\n", __FILE__, __LINE__, #condition, why ? why : "");     \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define OK(call) CHECK((call) == CVK_STATUS_OK)
#define THREADS 4
#define ROUNDS 200

static cvk_group *world;
static cvk_group *groups[THREADS];

static void count_call(void *context) { __atomic_add_fetch((int *)context, 1, __ATOMIC_SEQ_CST); }

static void *wait_too(void *work) {
    OK(cvk_work_wait((cvk_work *)work, CVK_FOREVER, NULL));
    return NULL;
}

/* Collectives of a group of its own, begun and waited for by two threads; messages in the world by a tag. */
static void *run(void *argument) {
    size_t thread = (size_t)argument, size = cvk_group_size(world), rank = cvk_group_rank(world);
    for (int round = 0; round < ROUNDS; round++) {
        int64_t *values = (int64_t *)malloc(8 * 100);
        int completed = 0;
        for (int i = 0; i < 100; i++) values[i] = (int64_t)rank + round;
        cvk_call call;
        memset(&call, 0, sizeof call);
        call.size = sizeof call, call.kind = CVK_KIND_ALL_REDUCE, call.dtype = CVK_TYPE_I64;
        call.recv = values, call.recv_count = 100;
        call.on_complete = count_call, call.on_complete_context = &completed;
        cvk_work *work;
        OK(cvk_start(groups[thread], &call, &work));
        pthread_t other;
        CHECK(pthread_create(&other, NULL, wait_too, work) == 0);
        OK(cvk_work_wait(work, CVK_FOREVER, NULL));
        CHECK(pthread_join(other, NULL) == 0);
        cvk_work_free(work);
        CHECK(values[99] == (int64_t)(size * (size - 1) / 2 + (size_t)round * size));
        while (__atomic_load_n(&completed, __ATOMIC_SEQ_CST) != 1) { }
        free(values);

        int64_t mine = (int64_t)(1000 * thread) + round, left = -1;
        cvk_call ring[2];
        memset(ring, 0, sizeof ring);
        ring[0].size = ring[1].size = sizeof(cvk_call);
        ring[0].dtype = ring[1].dtype = CVK_TYPE_I64, ring[0].tag = ring[1].tag = (uint32_t)thread;
        ring[0].kind = CVK_KIND_SEND, ring[0].peer = (int64_t)((rank + 1) % size);
        ring[0].send = &mine, ring[0].send_count = 1;
        ring[1].kind = CVK_KIND_RECV, ring[1].peer = (int64_t)((rank + size - 1) % size);
        ring[1].recv = &left, ring[1].recv_count = 1;
        OK(cvk_run(world, ring, 2, NULL));
        CHECK(left == mine);
        CHECK(cvk_barrier(NULL) == CVK_STATUS_INVALID_ARGUMENT && strstr(cvk_error_message(), "NULL"));
    }
    return NULL;
}

int main(void) {
    OK(cvk_init(NULL, &world));
    for (size_t i = 0; i < THREADS; i++) OK(cvk_group_split(world, 0, (int64_t)cvk_group_rank(world), &groups[i]));
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, run, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (size_t i = 0; i < THREADS; i++) cvk_group_free(groups[i]);
    cvk_group_free(world);
    return 0;
}

/* Calls every function of the library, and checks the results. Runs as one of several ranks. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <convoke.h>

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            const char *why = cvk_error_message();                                                           \
            fprintf(stderr, "%s:%d: %s is false; %s\n", __FILE__, __LINE__, #condition, why ? why : "");     \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define OK(call) CHECK((call) == CVK_STATUS_OK)
#define COUNT 5

static cvk_group *world;
static size_t rank, size;

/* The elements of rank `of`. */
static void fill(int64_t *values, size_t count, size_t of) {
    for (size_t i = 0; i < count; i++) values[i] = (int64_t)(100 * of + i);
}

static int64_t sum_over_ranks(size_t index, size_t ranks) {
    return (int64_t)(100 * (ranks * (ranks - 1) / 2) + index * ranks);
}

static void collectives(void) {
    int64_t mine[COUNT], *all = (int64_t *)calloc(size * COUNT, 8), *all2 = (int64_t *)calloc(size * COUNT, 8);
    int64_t result[COUNT];
    fill(mine, COUNT, rank);
    OK(cvk_barrier(world));

    memcpy(result, mine, sizeof mine);
    OK(cvk_broadcast(world, result, COUNT, CVK_TYPE_I64, 1));
    for (size_t i = 0; i < COUNT; i++) CHECK(result[i] == (int64_t)(100 + i));

    OK(cvk_all_reduce(world, mine, result, COUNT, CVK_TYPE_I64, CVK_OP_SUM));
    for (size_t i = 0; i < COUNT; i++) CHECK(result[i] == sum_over_ranks(i, size));
    memcpy(result, mine, sizeof mine);
    OK(cvk_all_reduce(world, NULL, result, COUNT, CVK_TYPE_I64, CVK_OP_MAX));
    CHECK(result[2] == (int64_t)(100 * (size - 1) + 2));

    OK(cvk_reduce(world, mine, rank == 0 ? result : NULL, COUNT, CVK_TYPE_I64, CVK_OP_SUM, 0));
    if (rank == 0) CHECK(result[4] == sum_over_ranks(4, size));
    memcpy(result, mine, sizeof mine);
    OK(cvk_reduce(world, NULL, result, COUNT, CVK_TYPE_I64, CVK_OP_MIN, 0));
    if (rank == 0) CHECK(result[4] == 4);

    OK(cvk_all_gather(world, mine, all, COUNT, CVK_TYPE_I64));
    for (size_t r = 0; r < size; r++) CHECK(all[r * COUNT + 3] == (int64_t)(100 * r + 3));
    memset(all2, 0, size * COUNT * 8);
    memcpy(all2 + rank * COUNT, mine, sizeof mine);
    OK(cvk_all_gather(world, NULL, all2, COUNT, CVK_TYPE_I64));
    CHECK(memcmp(all, all2, size * COUNT * 8) == 0);

    OK(cvk_reduce_scatter(world, all, result, COUNT, CVK_TYPE_I64, CVK_OP_SUM));
    for (size_t i = 0; i < COUNT; i++) CHECK(result[i] == (int64_t)(size * (100 * rank + i)));
    OK(cvk_reduce_scatter(world, NULL, all2, COUNT, CVK_TYPE_I64, CVK_OP_SUM));
    CHECK(memcmp(result, all2 + rank * COUNT, sizeof result) == 0);

    memset(all2, 0, size * COUNT * 8);
    OK(cvk_gather(world, mine, rank == 1 ? all2 : NULL, COUNT, CVK_TYPE_I64, 1));
    if (rank == 1) CHECK(memcmp(all, all2, size * COUNT * 8) == 0);
    OK(cvk_scatter(world, rank == 1 ? all2 : NULL, result, COUNT, CVK_TYPE_I64, 1));
    CHECK(memcmp(result, mine, sizeof mine) == 0);

    for (size_t to = 0; to < size; to++)
        for (size_t i = 0; i < COUNT; i++) all[to * COUNT + i] = (int64_t)(1000 * rank + 10 * to + i);
    OK(cvk_all_to_all(world, all, all2, COUNT, CVK_TYPE_I64));
    for (size_t r = 0; r < size; r++) CHECK(all2[r * COUNT + 1] == (int64_t)(1000 * r + 10 * rank + 1));
    OK(cvk_all_to_all(world, NULL, all, COUNT, CVK_TYPE_I64));
    CHECK(memcmp(all, all2, size * COUNT * 8) == 0);

    memcpy(result, mine, sizeof mine);
    OK(cvk_scan(world, result, COUNT, CVK_TYPE_I64, CVK_OP_SUM));
    CHECK(result[1] == sum_over_ranks(1, rank + 1));
    memcpy(result, mine, sizeof mine);
    OK(cvk_exclusive_scan(world, result, COUNT, CVK_TYPE_I64, CVK_OP_SUM));
    CHECK(result[1] == (rank == 0 ? 1 : sum_over_ranks(1, rank)));
    OK(cvk_monitored_barrier(world, 60000));
    free(all);
    free(all2);
}

static cvk_call call_of(cvk_kind kind) {
    cvk_call call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call;
    call.kind = (uint32_t)kind;
    call.dtype = CVK_TYPE_I64;
    return call;
}

/* Rank r has r + 1 elements. */
static void unequal_blocks(void) {
    size_t *counts = (size_t *)calloc(size, sizeof(size_t)), total = size * (size + 1) / 2, before = 0;
    for (size_t r = 0; r < size; r++) counts[r] = r + 1;
    for (size_t r = 0; r < rank; r++) before += r + 1;
    int64_t *mine = (int64_t *)calloc(rank + 1, 8), *all = (int64_t *)calloc(total, 8);
    fill(mine, rank + 1, rank);

    cvk_call call = call_of(CVK_KIND_ALL_GATHER_V);
    call.send = mine, call.send_count = rank + 1, call.recv = all, call.recv_count = total;
    call.recv_counts = counts;
    OK(cvk_run(world, &call, 1, NULL));
    CHECK(memcmp(all + before, mine, (rank + 1) * 8) == 0 && all[1] == 100);

    call = call_of(CVK_KIND_REDUCE_SCATTER_V);
    call.send = all, call.send_count = total, call.recv = mine, call.recv_count = rank + 1;
    call.send_counts = counts;
    OK(cvk_run(world, &call, 1, NULL));
    CHECK(mine[rank] == (int64_t)size * all[before + rank]);
    fill(mine, rank + 1, rank);

    call = call_of(CVK_KIND_GATHER_V);
    call.send = mine, call.send_count = rank + 1;
    int64_t *gathered = (int64_t *)calloc(total, 8);
    if (rank == 0) call.recv = gathered, call.recv_count = total, call.recv_counts = counts;
    OK(cvk_run(world, &call, 1, NULL));
    if (rank == 0) CHECK(memcmp(gathered, all, total * 8) == 0);

    call = call_of(CVK_KIND_SCATTER_V);
    call.recv = mine, call.recv_count = rank + 1;
    if (rank == 0) call.send = gathered, call.send_count = total, call.send_counts = counts;
    memset(mine, 0, (rank + 1) * 8);
    OK(cvk_run(world, &call, 1, NULL));
    CHECK(memcmp(mine, all + before, (rank + 1) * 8) == 0);

    /* To each rank as many elements as it has, so each rank gets rank + 1 elements of each. */
    size_t *received = (size_t *)calloc(size, sizeof(size_t));
    for (size_t r = 0; r < size; r++) received[r] = rank + 1;
    int64_t *blocks = (int64_t *)calloc(size * (rank + 1), 8);
    call = call_of(CVK_KIND_ALL_TO_ALL_V);
    call.send = all, call.send_count = total, call.send_counts = counts;
    call.recv = blocks, call.recv_count = size * (rank + 1), call.recv_counts = received;
    OK(cvk_run(world, &call, 1, NULL));
    for (size_t r = 0; r < size; r++) CHECK(blocks[r * (rank + 1)] == all[before]);
    free(counts), free(mine), free(all), free(gathered), free(received), free(blocks);
}

static void larger_by_absolute_value(void *context, void *into, const void *from, size_t count) {
    int64_t *a = (int64_t *)into;
    const int64_t *b = (const int64_t *)from;
    for (size_t i = 0; i < count; i++)
        if (llabs(b[i]) > llabs(a[i])) a[i] = b[i];
    (void)context;
}

static void reductions(void) {
    float value = 1, factor = (float)(rank + 1);
    cvk_call call = call_of(CVK_KIND_ALL_REDUCE);
    call.dtype = CVK_TYPE_F32, call.reduce_op = CVK_OP_PREMUL_SUM, call.factor = &factor;
    call.recv = &value, call.recv_count = 1;
    OK(cvk_run(world, &call, 1, NULL));
    CHECK(value == (float)(size * (size + 1) / 2));

    int64_t number = rank == 1 ? -7 : (int64_t)rank;
    call = call_of(CVK_KIND_ALL_REDUCE);
    call.reduce_op = CVK_OP_CUSTOM, call.reduce = larger_by_absolute_value;
    call.recv = &number, call.recv_count = 1;
    OK(cvk_run(world, &call, 1, NULL));
    CHECK(number == -7);
}

static void messages(void) {
    size_t right = (rank + 1) % size, left = (rank + size - 1) % size;
    int64_t mine[2] = {(int64_t)rank, 7}, got[3] = {-1, -1, -1};
    cvk_call calls[2] = {call_of(CVK_KIND_SEND), call_of(CVK_KIND_RECV)};
    calls[0].peer = (int64_t)right, calls[0].tag = 3, calls[0].send = mine, calls[0].send_count = 2;
    calls[1].peer = CVK_ANY_RANK, calls[1].tag = 3, calls[1].recv = got, calls[1].recv_count = 3;
    cvk_message status[2];
    OK(cvk_run(world, calls, 2, status));
    CHECK(got[0] == (int64_t)left && got[1] == 7 && got[2] == -1);
    CHECK(status[1].source == left && status[1].tag == 3 && status[1].count == 2);

    cvk_message message;
    CHECK(cvk_try_probe(world, CVK_ANY_RANK, 9, &message) == CVK_STATUS_PENDING);
    if (rank == 0) OK(cvk_send(world, mine, 2, CVK_TYPE_I64, 1, 4));
    if (rank == 1) {
        OK(cvk_probe(world, 0, 4, &message));
        CHECK(message.source == 0 && message.count == 2);
        OK(cvk_recv(world, got, 3, CVK_TYPE_I64, 0, 4, &message));
        CHECK(message.count == 2 && got[0] == 0);
    }
    /* A message that is too long ends this call and not the group. */
    if (rank == 0) OK(cvk_send(world, mine, 2, CVK_TYPE_I64, 1, 5));
    if (rank == 1) {
        CHECK(cvk_recv(world, got, 1, CVK_TYPE_I64, 0, 5, NULL) == CVK_STATUS_TRUNCATED);
        CHECK(!cvk_error_ends_group() && strstr(cvk_error_json(), "\"code\":\"truncated\""));
    }
    OK(cvk_barrier(world));
}

static void count_call(void *context) { __atomic_add_fetch((int *)context, 1, __ATOMIC_SEQ_CST); }

static void operations_in_progress(void) {
    int done = 0, later = 0, descriptor = -2;
    int64_t value = (int64_t)rank;
    cvk_call call = call_of(CVK_KIND_ALL_REDUCE);
    call.recv = &value, call.recv_count = 1;
    call.on_complete = count_call, call.on_complete_context = &done;
    cvk_work *work = NULL;
    if (rank == 0) {
        OK(cvk_start(world, &call, &work));
        /* The other ranks wait for the message. */
        CHECK(!cvk_work_is_done(work));
        CHECK(cvk_work_wait(work, 1, NULL) == CVK_STATUS_PENDING);
        OK(cvk_work_descriptor(work, &descriptor));
        OK(cvk_work_on_complete(work, count_call, &later));
        for (size_t to = 1; to < size; to++) OK(cvk_send(world, &value, 1, CVK_TYPE_I64, to, 6));
        struct pollfd ready = {descriptor, POLLIN, 0};
        CHECK(poll(&ready, 1, 60000) == 1);
    } else {
        int64_t start;
        OK(cvk_recv(world, &start, 1, CVK_TYPE_I64, 0, 6, NULL));
        OK(cvk_start(world, &call, &work));
        OK(cvk_work_on_complete(work, count_call, &later));
    }
    OK(cvk_work_wait(work, CVK_FOREVER, NULL));
    OK(cvk_work_wait(work, 0, NULL));
    CHECK(cvk_work_is_done(work) && value == (int64_t)(size * (size - 1) / 2));
    cvk_work_free(work);

    /* A handle that is freed early does not end its operation; the callback tells when. */
    int released = 0;
    call.on_complete_context = &released;
    OK(cvk_start(world, &call, &work));
    cvk_work_free(work);
    OK(cvk_barrier(world));
    while (__atomic_load_n(&released, __ATOMIC_SEQ_CST) == 0) { }
    while (__atomic_load_n(&done, __ATOMIC_SEQ_CST) + __atomic_load_n(&later, __ATOMIC_SEQ_CST) < 2) { }
}

static void groups(void) {
    CHECK(cvk_group_local_rank(world) == rank && cvk_group_local_size(world) == size);
    CHECK(strcmp(cvk_group_name(world), "every-call") == 0 && cvk_group_timeout_ms(world) == 60000);
    CHECK(cvk_group_restart_count(world) == 0 && cvk_group_failure_json(world) == NULL);

    cvk_group *halves, *part, *clone;
    OK(cvk_group_split(world, (int64_t)(rank % 2), -(int64_t)rank, &halves));
    CHECK(cvk_group_size(halves) == (size + (rank % 2 == 0)) / 2);
    CHECK(cvk_group_global_rank(halves, cvk_group_rank(halves)) == rank);
    CHECK(cvk_group_global_rank(halves, 99) == SIZE_MAX);
    OK(cvk_barrier(halves));
    cvk_group_free(halves);
    OK(cvk_group_split(world, rank == 0 ? -1 : 0, 0, &halves));
    CHECK((halves == NULL) == (rank == 0));
    cvk_group_free(halves);

    const size_t members[2] = {1, 0};
    OK(cvk_group_subgroup(world, members, 2, "pair", &part));
    CHECK((part != NULL) == (rank < 2));
    if (part) {
        CHECK(cvk_group_rank(part) == 1 - rank && strstr(cvk_group_name(part), "pair"));
        OK(cvk_barrier(part));
        OK(cvk_group_destroy(part));
        CHECK(cvk_barrier(part) == CVK_STATUS_DESTROYED);
        cvk_group_free(part);
    }
    OK(cvk_group_clone(world, 1234, &clone));
    CHECK(cvk_group_timeout_ms(clone) == 1234);
    cvk_group_free(clone);
    OK(cvk_group_clone(world, 0, &clone));
    CHECK(cvk_group_timeout_ms(clone) == 60000);
    cvk_group_free(clone);
}

static void memory_of_the_group(void) {
    size_t bytes = 1 << 20;
    cvk_memory *memory;
    OK(cvk_alloc(world, bytes, &memory));
    float *values = (float *)cvk_memory_address(memory);
    CHECK(values && (uintptr_t)values % 16 == 0);
    (void)cvk_memory_is_shared(memory);
    for (size_t i = 0; i < bytes / 4; i++) values[i] = (float)rank;
    OK(cvk_all_reduce(world, NULL, values, bytes / 4, CVK_TYPE_F32, CVK_OP_SUM));
    CHECK(values[bytes / 4 - 1] == (float)(size * (size - 1) / 2));
    /* A part that does not end with a page is apart only if the program uses no more. */
    size_t part = 10004;
    CHECK(!cvk_is_shared_memory(world, values, part));
    OK(cvk_memory_limit_use(memory, part));
    CHECK(cvk_is_shared_memory(world, values, part) == cvk_memory_is_shared(memory));
    for (size_t i = 0; i < part / 4; i++) values[i] = (float)rank;
    OK(cvk_all_reduce(world, NULL, values, part / 4, CVK_TYPE_F32, CVK_OP_SUM));
    CHECK(values[part / 4 - 1] == (float)(size * (size - 1) / 2));
    cvk_memory_free(memory);
    CHECK(cvk_memory_limit_use(NULL, part) == CVK_STATUS_INVALID_ARGUMENT);
    /* Memory of any size is apart as a whole. */
    OK(cvk_alloc(world, part, &memory));
    CHECK(cvk_is_shared_memory(world, cvk_memory_address(memory), part) == cvk_memory_is_shared(memory));
    cvk_memory_free(memory);
}

/* Memory that the program has mapped itself. */
static void adopted_memory(void) {
    size_t bytes = 1 << 20;
    int file = memfd_create("program", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, (off_t)bytes) == 0);
    float *values = (float *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(values != MAP_FAILED);
    cvk_memory *memory;
    OK(cvk_adopt(world, file, 0, values, bytes, &memory));
    CHECK(cvk_memory_address(memory) == values);
    CHECK(cvk_is_shared_memory(world, values, bytes) == cvk_memory_is_shared(memory));
    CHECK(!cvk_is_shared_memory(world, values, 10) && !cvk_is_shared_memory(NULL, values, bytes));
    for (size_t i = 0; i < bytes / 4; i++) values[i] = (float)rank;
    OK(cvk_all_reduce(world, NULL, values, bytes / 4, CVK_TYPE_F32, CVK_OP_SUM));
    CHECK(values[bytes / 4 - 1] == (float)(size * (size - 1) / 2));
    cvk_memory_free(memory);
    CHECK(!cvk_is_shared_memory(world, values, bytes));
    CHECK(cvk_adopt(world, file, 1, values, bytes, &memory) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_adopt(world, -1, 0, values, bytes, &memory) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(munmap(values, bytes) == 0 && close(file) == 0);
}

static volatile bool is_interrupted;

static bool check_interrupt(void) { return is_interrupted; }

/* A wait ends when the program is interrupted, and the operation goes on. */
static void interrupt(void) {
    cvk_set_interrupt_check(check_interrupt);
    int64_t value = 0, sent = 5;
    if (size == 1) return;
    if (rank == 0) {
        cvk_call call = call_of(CVK_KIND_RECV);
        call.dtype = CVK_TYPE_I64, call.peer = 1, call.tag = 77, call.recv = &value, call.recv_count = 1;
        cvk_work *work;
        OK(cvk_start(world, &call, &work));
        is_interrupted = true;
        CHECK(cvk_work_wait(work, CVK_FOREVER, NULL) == CVK_STATUS_PENDING);
        is_interrupted = false;
        OK(cvk_barrier(world));
        OK(cvk_work_wait(work, CVK_FOREVER, NULL));
        CHECK(value == sent);
        cvk_work_free(work);
        return;
    }
    OK(cvk_barrier(world));
    if (rank == 1) OK(cvk_send(world, &sent, 1, CVK_TYPE_I64, 0, 77));
}

/* Wrong arguments are errors that name what is wrong, and nothing else happens. */
static void wrong_arguments(void) {
    int64_t value = 0;
    cvk_call call = call_of(CVK_KIND_ALL_REDUCE);
    call.recv = &value, call.recv_count = 1;
    CHECK(cvk_barrier(NULL) == CVK_STATUS_INVALID_ARGUMENT && strstr(cvk_error_message(), "group is NULL"));
    CHECK(cvk_init(NULL, NULL) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_start(world, &call, NULL) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_start(world, NULL, NULL) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_run(world, NULL, 1, NULL) == CVK_STATUS_INVALID_ARGUMENT);
    OK(cvk_run(world, NULL, 0, NULL));
    call.kind = 99;
    CHECK(cvk_run(world, &call, 1, NULL) == CVK_STATUS_INVALID_ARGUMENT && strstr(cvk_error_message(), "kind 99"));
    call.kind = CVK_KIND_ALL_REDUCE, call.dtype = 77;
    CHECK(cvk_run(world, &call, 1, NULL) == CVK_STATUS_INVALID_ARGUMENT && strstr(cvk_error_message(), "dtype 77"));
    call.dtype = CVK_TYPE_I64, call.size = 8;
    CHECK(cvk_run(world, &call, 1, NULL) == CVK_STATUS_INVALID_ARGUMENT && strstr(cvk_error_message(), "cvk_call.size"));
    call.size = sizeof call, call.recv = NULL;
    CHECK(cvk_run(world, &call, 1, NULL) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_broadcast(world, &value, 1, CVK_TYPE_I64, 99) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_all_reduce(world, NULL, &value, 1, CVK_TYPE_I64, CVK_OP_PREMUL_SUM) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_all_reduce(world, NULL, &value, 1, CVK_TYPE_I64, CVK_OP_CUSTOM) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_all_reduce(world, NULL, &value, 1, CVK_TYPE_I64, 99) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(cvk_work_wait(NULL, 0, NULL) == CVK_STATUS_INVALID_ARGUMENT);
    CHECK(strstr(cvk_error_json(), "\"code\":\"invalid_argument\""));
    CHECK(cvk_work_is_done(NULL) && cvk_group_rank(NULL) == 0 && cvk_group_name(NULL) == NULL);
    cvk_group_free(NULL);
    cvk_work_free(NULL);
    cvk_memory_free(NULL);
    const cvk_api_table *table = cvk_api(CVK_API_VERSION);
    CHECK(table && table->size == sizeof *table && table->version == CVK_API_VERSION);
    CHECK(table->group_size(world) == size && cvk_api(99) == NULL);
    OK(table->barrier(world));
}

/* Ranks 0 and 1 meet again at a server of rank 0. */
static void group_at_a_store(void) {
    cvk_store *store = NULL;
    int64_t port = 0;
    if (rank == 0) {
        OK(cvk_store_serve("127.0.0.1", 0, &store));
        port = cvk_store_port(store);
        CHECK(cvk_store_serve("127.0.0.1", (uint16_t)port, &store) == CVK_STATUS_INVALID_ARGUMENT);
        OK(cvk_send(world, &port, 1, CVK_TYPE_I64, 1, 8));
    } else if (rank == 1) {
        OK(cvk_recv(world, &port, 1, CVK_TYPE_I64, 0, 8, NULL));
    } else {
        return;
    }
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1:%d", (int)port);
    cvk_init_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options, options.store = address, options.name = "pair";
    options.rank = rank, options.world_size = 2;
    for (int round = 0; round < 3; round++) {
        cvk_group *pair;
        OK(cvk_init(&options, &pair));
        OK(cvk_barrier(pair));
        cvk_group_free(pair);
    }
    OK(cvk_run(world, NULL, 0, NULL));
    if (rank == 0) OK(cvk_recv(world, &port, 1, CVK_TYPE_I64, 1, 9, NULL));
    if (rank == 1) OK(cvk_send(world, &port, 1, CVK_TYPE_I64, 0, 9));
    cvk_store_free(store);
}

/* An abort ends the group on all ranks; then its survivors go on. */
static void abort_and_shrink(void) {
    cvk_group *all, *rest;
    OK(cvk_group_split(world, 0, (int64_t)rank, &all));
    if (rank == 0) OK(cvk_group_abort(all, "the test says so"));
    int64_t value = 0;
    cvk_status status;
    do status = cvk_all_reduce(all, NULL, &value, 1, CVK_TYPE_I64, CVK_OP_SUM);
    while (status == CVK_STATUS_OK);
    CHECK(status == CVK_STATUS_ABORTED && cvk_error_ends_group());
    CHECK(strstr(cvk_error_message(), "the test says so") && strstr(cvk_group_failure_json(all), "\"rank\":0"));
    OK(cvk_group_shrink(all, 20000, &rest));
    CHECK(cvk_group_size(rest) == size);
    OK(cvk_barrier(rest));
    cvk_group_free(rest);
    cvk_group_free(all);
}

int main(void) {
    CHECK(cvk_error_message() == NULL && cvk_error_json() == NULL && !cvk_error_ends_group());
    cvk_init_options options;
    memset(&options, 0, sizeof options);
    options.size = 1;
    CHECK(cvk_init(&options, &world) == CVK_STATUS_INVALID_ARGUMENT);
    options.size = sizeof options;
    options.url = "nonsense://";
    CHECK(cvk_init(&options, &world) == CVK_STATUS_ENVIRONMENT);
    options.url = NULL;
    options.store = "127.0.0.1:1";
    CHECK(cvk_init(&options, &world) == CVK_STATUS_INVALID_ARGUMENT && strstr(cvk_error_message(), "world_size"));
    options.store = NULL;
    options.name = "every-call";
    options.timeout_ms = 60000;
    OK(cvk_init(&options, &world));
    rank = cvk_group_rank(world), size = cvk_group_size(world);
    collectives();
    unequal_blocks();
    reductions();
    messages();
    operations_in_progress();
    groups();
    memory_of_the_group();
    adopted_memory();
    interrupt();
    wrong_arguments();
    group_at_a_store();
    abort_and_shrink();
    OK(cvk_barrier(world));
    cvk_group_free(world);
    printf("rank %zu of %zu called every function\n", rank, size);
    return 0;
}

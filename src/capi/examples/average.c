/* Every rank averages its numbers with all others, and then passes a number around a ring.
 *
 *   cc average.c $(pkg-config --cflags --libs convoke) -o average
 *   convoke --standalone --nproc-per-node=4 ./average
 */
#include <convoke.h>
#include <stdio.h>
#include <stdlib.h>

/* Prints what went wrong, with the rank and host at fault, and ends this rank. */
static void check(cvk_status status) {
    if (status != CVK_STATUS_OK) {
        fprintf(stderr, "average: %s\n", cvk_error_message());
        exit(1);
    }
}

int main(void) {
    cvk_group *world;
    check(cvk_init(NULL, &world));
    size_t rank = cvk_group_rank(world), size = cvk_group_size(world);

    float values[1000];
    for (size_t i = 0; i < 1000; i++) values[i] = (float)rank;
    check(cvk_all_reduce(world, NULL, values, 1000, CVK_TYPE_F32, CVK_OP_AVG));
    if (rank == 0) printf("average %g\n", values[0]);

    /* Both operations progress at once, so the ring does not wait for itself. */
    int64_t mine = (int64_t)rank, left = -1;
    cvk_call calls[2] = {
        {.size = sizeof(cvk_call), .kind = CVK_KIND_SEND, .dtype = CVK_TYPE_I64,
         .peer = (int64_t)((rank + 1) % size), .send = &mine, .send_count = 1},
        {.size = sizeof(cvk_call), .kind = CVK_KIND_RECV, .dtype = CVK_TYPE_I64,
         .peer = (int64_t)((rank + size - 1) % size), .recv = &left, .recv_count = 1},
    };
    check(cvk_run(world, calls, 2, NULL));

    /* Computes while the sum is under way. */
    cvk_call sum = {.size = sizeof(cvk_call), .kind = CVK_KIND_ALL_REDUCE, .dtype = CVK_TYPE_I64,
                    .reduce_op = CVK_OP_SUM, .recv = &left, .recv_count = 1};
    cvk_work *work;
    check(cvk_start(world, &sum, &work));
    check(cvk_work_wait(work, CVK_FOREVER, NULL));
    cvk_work_free(work);
    if (rank == 0) printf("the ranks to the left add up to %lld\n", (long long)left);

    cvk_group_free(world);
    return 0;
}

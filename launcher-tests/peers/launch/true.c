/* A worker that adds the time of its start (CLOCK_MONOTONIC, nanoseconds, 8 bytes) to the file STARTED, and succeeds. */
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    unsigned long long ns = now.tv_sec * 1000000000ull + now.tv_nsec;
    int file = open(getenv("STARTED"), O_WRONLY | O_APPEND);
    return write(file, &ns, sizeof ns) == sizeof ns ? 0 : 1;
}

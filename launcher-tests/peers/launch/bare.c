/* The least that a launcher must do, as the yardstick for those that do more: starts N workers with their RANK,
 * waits for them, and, if one fails and a restart is left, ends the others with SIGTERM and starts all anew.
 *
 *   bare --nproc-per-node=N [--max-restarts=M] [flags that it ignores] --no-python PROGRAM [ARGUMENT...] */
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
enum { MOST = 1024 };

static long number(int argc, char **argv, const char *flag, long otherwise) {
  for (int i = 1; i < argc; i++)
    if (!strncmp(argv[i], flag, strlen(flag))) return atol(argv[i] + strlen(flag));
  return otherwise;
}

int main(int argc, char **argv) {
  long workers = number(argc, argv, "--nproc-per-node=", 1), restarts = number(argc, argv, "--max-restarts=", 0);
  char **program = argv + 1, text[32];
  while (*program && strcmp(*program, "--no-python")) program++;
  if (!*program || !*++program || workers < 1 || workers > MOST) return 2;
  for (;; restarts--) {
    pid_t pids[MOST];
    for (long i = 0; i < workers; i++) {
      snprintf(text, sizeof text, "%ld", i);
      setenv("RANK", text, 1);
      if (posix_spawnp(&pids[i], program[0], NULL, NULL, program, environ)) return 1;
    }
    int failed = 0, status;
    for (long left = workers; left > 0; left--) {
      pid_t ended = wait(&status);
      for (long i = 0; i < workers; i++) if (pids[i] == ended) pids[i] = 0;
      if (status && !failed) {
        failed = 1;
        for (long i = 0; i < workers; i++) if (pids[i]) kill(pids[i], SIGTERM);
      }
    }
    if (!failed || restarts == 0) return failed;
  }
}

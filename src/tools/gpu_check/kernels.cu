// What keeps a GPU busy. `scripts/kernels` makes kernels.ptx of it.

// Until the number is not 0, which the host sets.
extern "C" __global__ void spin(const volatile int *flag) {
  while (*flag == 0) __nanosleep(1000);
}

// Adds 1 to each number, after so many ticks of the processor's clock.
extern "C" __global__ void add_one(float *at, unsigned long long count, long long ticks) {
  long long begin = clock64();
  while (clock64() - begin < ticks) __nanosleep(1000);
  for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x) at[i] += 1;
}

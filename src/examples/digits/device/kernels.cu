// The network of digits on a GPU: what network.rs does on the host, one thread for each number that comes out.
//
// Written to be read, not to be fast: the network is small. Rows are examples; `units` are those of a layer.
// `scripts/kernels` makes kernels.ptx of it.

#define THREAD (blockIdx.x * blockDim.x + threadIdx.x)

// The pixels of some of all examples, by number.
extern "C" __global__ void gather(float *rows, const float *all, const unsigned *chosen, unsigned pixels, unsigned count) {
  unsigned i = THREAD;
  if (i < count) rows[i] = all[(unsigned long long)chosen[i / pixels] * pixels + i % pixels];
}

// given[row][unit] = bias[unit] + sum of weights[unit][i] * from[row][i], and 0 where that is negative if `rectified`.
extern "C" __global__ void forward(float *given, const float *from, const float *weights, const float *bias, unsigned inputs,
                                   unsigned units, unsigned count, unsigned rectified) {
  unsigned i = THREAD;
  if (i >= count) return;
  const float *of_row = from + i / units * inputs, *of_unit = weights + i % units * inputs;
  float sum = bias[i % units];
  for (unsigned k = 0; k < inputs; k++) sum += of_unit[k] * of_row[k];
  given[i] = rectified && sum < 0 ? 0 : sum;
}

// Scores become the errors of the scores, times `weight`: softmax, less one for the right digit. And each row's loss.
extern "C" __global__ void softmax(float *scores, float *losses, const unsigned *labels, const unsigned *chosen, unsigned classes,
                                   float weight, unsigned count) {
  unsigned row = THREAD;
  if (row >= count) return;
  float *of_row = scores + row * classes, highest = of_row[0], sum = 0;
  for (unsigned i = 1; i < classes; i++) highest = of_row[i] > highest ? of_row[i] : highest;
  for (unsigned i = 0; i < classes; i++) sum += expf(of_row[i] - highest);
  float total = highest + logf(sum);
  unsigned label = labels[chosen[row]];
  losses[row] = total - of_row[label];
  for (unsigned i = 0; i < classes; i++) of_row[i] = weight * (expf(of_row[i] - total) - (i == label));
}

// into[0] = the sum of some numbers, times `weight`.
extern "C" __global__ void sum(float *into, const float *of, float weight, unsigned count) {
  float all = 0;
  for (unsigned i = 0; i < count; i++) all += of[i];
  if (THREAD == 0) into[0] = weight * all;
}

// gradient[unit][i] = sum over rows of errors[row][unit] * from[row][i].
extern "C" __global__ void weights_gradient(float *gradient, const float *errors, const float *from, unsigned inputs,
                                            unsigned units, unsigned rows) {
  unsigned i = THREAD;
  if (i >= inputs * units) return;
  float all = 0;
  for (unsigned row = 0; row < rows; row++) all += errors[row * units + i / inputs] * from[row * inputs + i % inputs];
  gradient[i] = all;
}

extern "C" __global__ void bias_gradient(float *gradient, const float *errors, unsigned units, unsigned rows) {
  unsigned unit = THREAD;
  if (unit >= units) return;
  float all = 0;
  for (unsigned row = 0; row < rows; row++) all += errors[row * units + unit];
  gradient[unit] = all;
}

// Errors of what a layer was given, by rectified units: those that gave nothing have none.
extern "C" __global__ void errors_before(float *before, const float *errors, const float *weights, const float *from,
                                         unsigned inputs, unsigned units, unsigned count) {
  unsigned i = THREAD;
  if (i >= count) return;
  float all = 0;
  for (unsigned unit = 0; unit < units; unit++) all += errors[i / inputs * units + unit] * weights[unit * inputs + i % inputs];
  before[i] = from[i] > 0 ? all : 0;
}

// A step of gradient descent with momentum.
extern "C" __global__ void descend(float *values, float *velocity, const float *gradient, float rate, float momentum,
                                   unsigned count) {
  unsigned i = THREAD;
  if (i >= count) return;
  velocity[i] = momentum * velocity[i] + gradient[i];
  values[i] -= rate * velocity[i];
}

// total[0] += loss[0] * weight: of an epoch, without the host waiting for each step.
extern "C" __global__ void add_loss(double *total, const float *loss, double weight) {
  if (THREAD == 0) total[0] += loss[0] * weight;
}

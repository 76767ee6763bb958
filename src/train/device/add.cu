// Gradient accumulation on a device: adds what a pass has computed to what those before it have left.
//
// Halves are added in float and rounded once, to the nearest, as on the host. The conversions are written out: no header of
// CUDA is needed to compile this, nor a GPU of a certain age.
// `scripts/kernels` makes add.ptx of it.

typedef unsigned long long count_t;

#define EACH(i, count)                                                                            \
  for (count_t i = blockIdx.x * (count_t)blockDim.x + threadIdx.x, step = (count_t)gridDim.x * blockDim.x; i < (count); i += step)

static __device__ float of_f16(unsigned short bits) {
  unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float subnormal = mantissa * 5.9604644775390625e-8f; // 2^-24
  return sign ? -subnormal : subnormal;
}

static __device__ unsigned short to_f16(float value) {
  unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return sign | 0x7E00u;
  if (rest >= 0x477FF000u) return sign | 0x7C00u; // 65520 and more is nearer to infinity than to 65504
  // Of what is subnormal, adding 0.5 leaves the multiple of 2^-24 in the lowest bits, rounded.
  if (rest < 0x38800000u) return sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3F000000u);
  return sign | (rest - 0x38000000u + 0xFFFu + (rest >> 13 & 1u)) >> 13;
}

static __device__ float of_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

static __device__ unsigned short to_bf16(float value) {
  unsigned bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

extern "C" __global__ void add_f32(float *into, const float *from, count_t count) { EACH(i, count) into[i] += from[i]; }

extern "C" __global__ void add_f64(double *into, const double *from, count_t count) { EACH(i, count) into[i] += from[i]; }

extern "C" __global__ void add_f16(unsigned short *into, const unsigned short *from, count_t count) {
  EACH(i, count) into[i] = to_f16(of_f16(into[i]) + of_f16(from[i]));
}

extern "C" __global__ void add_bf16(unsigned short *into, const unsigned short *from, count_t count) {
  EACH(i, count) into[i] = to_bf16(of_bf16(into[i]) + of_bf16(from[i]));
}

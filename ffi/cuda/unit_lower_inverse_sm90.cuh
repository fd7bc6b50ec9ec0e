// The inverse of a unit lower triangular 64x64 matrix in shared memory, for the prepare kernel.
//
// fp32 in the 16x16 diagonal blocks, TF32 products with fp32 sums between them: with bf16 products
// the result is off by several percent where keys repeat, and a Neumann series of the whole
// overflows.
#pragma once

#include "sm90.cuh"

namespace jax_kda::sm90 {

// A lower block (I, J) of 16x16 fp32 numbers.
inline constexpr int kBlockRow = 20 * 4;  // bytes of a row, padded against bank conflicts
inline constexpr int kBlock = 16 * kBlockRow;
__device__ __forceinline__ uint32_t BlockOffset(int I, int J) {
  return (I * (I + 1) / 2 + J) * kBlock;
}

// c (16x16, in two 16x8 accumulators) += a b, fp32 blocks of shared memory in TF32.
__device__ __forceinline__ void BlockProduct(float (&c)[2][4], uint32_t a, uint32_t b, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t left = a + g * kBlockRow + (step * 8 + t) * 4;
    const uint32_t fragment[4] = {RoundTf32(LdsF32(left)), RoundTf32(LdsF32(left + 8 * kBlockRow)),
                                  RoundTf32(LdsF32(left + 16)),
                                  RoundTf32(LdsF32(left + 8 * kBlockRow + 16))};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t right = b + (step * 8 + t) * kBlockRow + (n * 8 + g) * 4;
      MmaTf32(c[n], fragment, RoundTf32(LdsF32(right)), RoundTf32(LdsF32(right + 4 * kBlockRow)));
    }
  }
}
__device__ __forceinline__ void StoreBlock(uint32_t block, const float (&c)[2][4], float sign,
                                           int lane) {
  const uint32_t a = block + (lane >> 2) * kBlockRow + (lane & 3) * 8;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    StsF32x2(a + n * 32, sign * c[n][0], sign * c[n][1]);
    StsF32x2(a + 8 * kBlockRow + n * 32, sign * c[n][2], sign * c[n][3]);
  }
}

// (I + L)^-1 in place of L, 64x64 in ten blocks, in two steps: the diagonal blocks of 16 rows by
// forward substitution, then X21 = -X22 L21 X11 for 16 + 16 and 32 + 32 rows.

// Of the 32 rows of `half`, by one warp. `scratch` holds a block.
__device__ __forceinline__ void InvertHalf(uint32_t L, uint32_t scratch, int half, int lane) {
  const int first = 2 * half;
  {
    const int j = lane & 15;  // half a warp a block, a lane a column
    const uint32_t block = L + BlockOffset(first + (lane >> 4), first + (lane >> 4));
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum[4] = {i == j ? 1.f : 0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 l = LdsF32x4(block + i * kBlockRow + m * 4);
        sum[0] = fmaf(-l.x, x[m], sum[0]);
        if (m + 1 < i) sum[1] = fmaf(-l.y, x[m + 1], sum[1]);
        if (m + 2 < i) sum[2] = fmaf(-l.z, x[m + 2], sum[2]);
        if (m + 3 < i) sum[3] = fmaf(-l.w, x[m + 3], sum[3]);
      }
      x[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) StsF32(block + i * kBlockRow + j * 4, x[i]);
    __syncwarp();
  }
  const uint32_t L21 = L + BlockOffset(first + 1, first);
  float t[2][4] = {}, x[2][4] = {};
  BlockProduct(t, L21, L + BlockOffset(first, first), lane);
  StoreBlock(scratch, t, 1.f, lane);
  __syncwarp();
  BlockProduct(x, L + BlockOffset(first + 1, first + 1), scratch, lane);
  StoreBlock(L21, x, -1.f, lane);
}

// Of all, from both halves, by four warps. `scratches` holds four blocks, `barrier` is a named one
// for the warps.
__device__ __forceinline__ void JoinInverses(uint32_t L, uint32_t scratches, int barrier, int warp,
                                             int lane) {
  const int I = 2 + (warp >> 1), J = warp & 1;
  float t[2][4] = {}, x[2][4] = {};
  for (int m = J; m < 2; ++m) BlockProduct(t, L + BlockOffset(I, m), L + BlockOffset(m, J), lane);
  StoreBlock(scratches + warp * kBlock, t, 1.f, lane);
  BarSync(barrier, 128);
  for (int m = 2; m <= I; ++m) {
    BlockProduct(x, L + BlockOffset(I, m), scratches + ((m - 2) * 2 + J) * kBlock, lane);
  }
  StoreBlock(L + BlockOffset(I, J), x, -1.f, lane);
  BarSync(barrier, 128);
}

}  // namespace jax_kda::sm90

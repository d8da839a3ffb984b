// Loops of the compressors over a strip of a gradient that stays in the first-level cache, for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/steps.hpp"

namespace lastgood {

enum class SparseType { float32, float16, bfloat16 };

// A magnitude's bits: they order as the magnitudes do.
using Weight = std::uint32_t;
constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;
constexpr Weight kInfinity = 0x7F800000;

constexpr std::size_t kBlockWidth = 16;
constexpr std::size_t kStripElements = 256;  // a multiple of kBlockWidth; with few, a CPU reads the next strip meanwhile
constexpr std::size_t kStreamAlign = 64;     // bytes

struct Found {
    std::size_t above;  // heavier than the bound: stored
    std::size_t equal;  // as heavy as it: only counted
};

struct CompressKernels {
    // strip[i] = gradient[i] + residual[i], or gradient[i] if there is no residual.
    void (*sum[3])(const void* gradient, const float* residual, float* strip, std::size_t count);
    // Of two float32, and what weighs less than `heavy` of it past the caches to `target` (aligned), the rest as zeros.
    // `count` is a multiple of kBlockWidth. After `streamed` other threads may read what this one wrote.
    void (*sum_stream)(const float* gradient, const float* residual, float* strip, std::size_t count, float* target,
                       Weight heavy);
    void (*streamed)();
    // target[i] = gradient[i] + residual[i], by way of the caches; `target` may be the residual, and stays as it is where the sum
    // is not finite. Whether all are.
    bool (*add)(const float* gradient, const float* residual, std::size_t count, float* target);
    Weight (*largest)(const float* strip, std::size_t count);
    // Stores numbers (from `first` on) and values of elements above the bound, in order. Up to 16 more are overwritten.
    Found (*single)(const float* strip, std::size_t count, std::uint32_t first, Weight bound, std::uint32_t* indices,
                    float* values);
    // As `single`, for complete blocks, with their weights.
    Found (*blocks)(const float* strip, std::size_t count, std::uint32_t first, Weight bound, std::uint32_t* indices,
                    Weight* weights, float* values);
    // Copies numbers and values of elements that weigh `least` or more; returns how many they are.
    std::size_t (*keep)(const std::uint32_t* indices, const float* values, std::size_t count, Weight least,
                        std::uint32_t* kept_indices, float* kept_values);
};

const CompressKernels& compress_kernels(InstructionSet set);

// What a block of `count` elements weighs: 16 times their mean magnitude.
Weight block_weight(const float* values, std::size_t count);

// The nearest number of that type, never an infinity: stored in 16 bits (not if it is float32), and as it is.
float narrowed(float value, SparseType type, std::uint16_t* stored);

// One number of a gradient of that type.
float widened(const void* from, SparseType type, std::size_t at);

}  // namespace lastgood

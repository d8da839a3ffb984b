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
constexpr std::size_t kStripElements = 1024;  // a multiple of kBlockWidth

struct Found {
    std::size_t above;  // heavier than the bound: stored
    std::size_t equal;  // as heavy as it: only counted
};

struct CompressKernels {
    // strip[i] = gradient[i] + residual[i], or gradient[i] if there is no residual.
    void (*sum[3])(const void* gradient, const float* residual, float* strip, std::size_t count);
    Weight (*largest)(const float* strip, std::size_t count);
    // Stores numbers (from `first` on) and values of elements above the bound, in order. Up to 16 more are overwritten.
    Found (*single)(const float* strip, std::size_t count, std::uint32_t first, Weight bound, std::uint32_t* indices,
                    float* values);
    // As `single`, for complete blocks, with their weights.
    Found (*blocks)(const float* strip, std::size_t count, std::uint32_t first, Weight bound, std::uint32_t* indices,
                    Weight* weights, float* values);
    // Writes past the caches.
    void (*stream)(float* target, const float* strip, std::size_t count);
};

const CompressKernels& compress_kernels(InstructionSet set);

// What a block of `count` elements weighs: 16 times their mean magnitude.
Weight block_weight(const float* values, std::size_t count);

// The nearest number of that type, never an infinity: stored in 16 bits (not if it is float32), and as it is.
float narrowed(float value, SparseType type, std::uint16_t* stored);

// One number of a gradient of that type.
float widened(const void* from, SparseType type, std::size_t at);

}  // namespace lastgood

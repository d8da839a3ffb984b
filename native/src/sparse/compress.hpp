// The compressors: they choose places of gradient + residual and write the new residual in the same pass.
// src/lastgood/sparse/compressors.py says what they promise; tests/sparse/plain_twin.py is the same in numpy.
#pragma once

#include <cstdint>
#include <string>

#include "sparse/compress_kernels.hpp"

namespace lastgood {

enum class SparseChoice {
    heaviest,   // exactly `wanted` places; of equal ones the first
    threshold,  // all that weigh `threshold` or more, if they are `wanted` to `most`; else the `middle` heaviest
    given,      // the `wanted` places that `indices` holds, ascending
    all
};

struct CompressOrder {
    const void* gradient = nullptr;
    SparseType gradient_type = SparseType::float32;
    const float* residual = nullptr;  // null: there is none
    float* target = nullptr;          // of the new residual: null only if there is no residual; may be `residual`
    std::uint64_t elements = 0;       // 1 to 2^32
    std::size_t width = 1;            // or kBlockWidth
    SparseType value_type = SparseType::float32;
    SparseChoice choice = SparseChoice::heaviest;
    std::uint64_t wanted = 0;
    std::uint64_t middle = 0;
    std::uint64_t most = 0;
    bool has_threshold = false;
    Weight threshold = 0;
    // Room for as many as can be chosen; values of `width` each.
    std::uint32_t* indices = nullptr;
    void* values = nullptr;
    unsigned threads = 1;
    std::uint64_t sample = 0;  // least number of places looked at for a first bound; 0: a good one
};

struct CompressResult {
    bool finite = true;        // false: nothing was chosen; `target` is as before if it is `residual`, else undefined
    bool held = false;         // the threshold that was given chose
    std::uint64_t count = 0;   // chosen places
    Weight least = 0;          // weight of the lightest chosen one; not for given, all and a threshold that held
    unsigned reads = 0;        // of tensors as long as the gradient: gradient, residual, or what became of them
};

// Throws std::invalid_argument for an unknown `variant` ("" is the fastest), and std::bad_alloc.
CompressResult compress(const CompressOrder& order, const std::string& variant);

// The first `count` numbers of a permutation of those below `places` that a seed and the number of a call make, ascending.
void draw_places(std::uint64_t places, std::uint64_t count, std::uint64_t seed, std::uint64_t call, std::uint32_t* indices);

}  // namespace lastgood

// Steps of SGD and Adam over those elements of a tensor that some rank sent, and over the steps that an element missed, to the
// bit as torch's single-tensor kernels make them on a CPU. tests/sparse/support/update_twin.py is the same in torch's operations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lastgood {

enum class SparseValues { float32, float16, bfloat16 };

// What one rank sent. `indices` ascend; there are `count` times the width of values.
struct SparseBlocks {
    const std::uint32_t* indices = nullptr;
    std::uint64_t count = 0;
    const void* values = nullptr;
    SparseValues type = SparseValues::float32;
};

constexpr std::size_t kRowNumbers = 9;  // sparse/steps.py says what they are

// A tensor of float32 and its moments (null if there are none), and the steps that it remembers.
struct SparseTensor {
    bool adam = false;
    float* parameter = nullptr;
    float* first = nullptr;
    float* second = nullptr;
    std::uint64_t elements = 0;
    unsigned width = 1;              // of a place: 1 element, or a block of 16
    const double* rows = nullptr;    // of step base + 1 and those after it
    std::uint64_t steps = 0;         // how many rows
    std::int32_t base = 0;
    std::int32_t* touched = nullptr;  // of each place: its last step; null if nothing is made up
};

// Makes the last step at the places that any rank sent, by the sum of their values in the order of ranks times `scale`; before
// that, if there are counters, those that each place missed, with gradients of zero. Throws std::invalid_argument, and has
// changed nothing, for blocks that are no valid ones, for a tensor that lacks something, and for an unknown variant.
void sparse_update(const SparseTensor& tensor, const std::vector<SparseBlocks>& ranks, float scale, unsigned threads,
                   const std::string& variant);

// The same of several tensors, with what ranks sent of each. Nothing has changed in any if one is refused.
void sparse_update_all(const std::vector<SparseTensor>& tensors, const std::vector<std::vector<SparseBlocks>>& ranks, float scale,
                       unsigned threads, const std::string& variant);

// Makes all steps that any place missed; its counters then say so.
void sparse_catch_up(const SparseTensor& tensor, unsigned threads, const std::string& variant);

}  // namespace lastgood

// Which weight the heaviest places have: about, by a sample, or exactly, by passes over all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "sparse/compress_source.hpp"

namespace lastgood {

// Weights of one place in each of `size` stretches, at random: data may have a period.
std::vector<Weight> sampled_weights(const CompressSource& source, std::uint64_t size);

// The `rank`-th heaviest of the first `size` weights, which are reordered: the heavier ones are in front of it.
Weight nth_heaviest(std::vector<Weight>& weights, std::uint64_t size, std::uint64_t rank);

// The weight of the `count`-th heaviest place, by two passes over all: the upper 16 bits of weights, then the lower 15.
Weight heaviest_bound(CompressSource& source, std::uint64_t count);

}  // namespace lastgood

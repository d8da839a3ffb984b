// What is sent of values, and what sending them leaves in the residual.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sparse/compress.hpp"

namespace lastgood {

class CompressOutput {
  public:
    explicit CompressOutput(const CompressOrder& order) : order_(order), width_(order.width) {}

    // What is sent of a value goes to slot `at` of the values; returns what is left.
    float send(float value, std::uint64_t at) const {
        if (order_.value_type == SparseType::float32) {
            static_cast<float*>(order_.values)[at] = value;
            return 0.0f;
        }
        return value - narrowed(value, order_.value_type, static_cast<std::uint16_t*>(order_.values) + at);
    }

    float rest(float value) const {
        if (order_.value_type == SparseType::float32) return 0.0f;
        std::uint16_t stored;
        return value - narrowed(value, order_.value_type, &stored);
    }

    // Writes a place's values into the residual.
    void put(std::uint32_t index, const float* values) const {
        const std::uint64_t at = std::uint64_t(index) * width_;
        std::copy_n(values, std::min<std::uint64_t>(width_, order_.elements - at), order_.target + at);
    }

    void put_rest(std::uint32_t index, const float* values) const {
        float rests[kBlockWidth];
        for (std::size_t i = 0; i < width_; ++i) rests[i] = rest(values[i]);
        put(index, rests);
    }

  private:
    const CompressOrder& order_;
    const std::size_t width_;
};

}  // namespace lastgood

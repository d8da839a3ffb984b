// Sums and quotients of 16-bit floating-point numbers: computed in float, rounded to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lastgood {

// target[i] = source[i] + target[i]
void add_float16(std::uint16_t* target, const std::uint16_t* source, std::size_t elements);
void add_bfloat16(std::uint16_t* target, const std::uint16_t* source, std::size_t elements);

// target[i] = target[i] / divisor
void divide_float16(std::uint16_t* target, std::size_t elements, float divisor);
void divide_bfloat16(std::uint16_t* target, std::size_t elements, float divisor);

}  // namespace lastgood

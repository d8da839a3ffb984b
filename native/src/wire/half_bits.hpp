// One 16-bit floating-point number to float and back, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace lastgood {

inline float to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint32_t to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bfloat16(std::uint16_t value) { return to_float(std::uint32_t(value) << 16); }

inline std::uint16_t to_bfloat16(float value) {
    const std::uint32_t bits = to_bits(value);
    const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return value != value ? std::uint16_t(0x7FC0) : std::uint16_t(rounded);
}

inline float from_float16(std::uint16_t value) {
    const std::uint32_t sign = std::uint32_t(value & 0x8000) << 16;
    const std::uint32_t exponent = (value >> 10) & 0x1F;
    const std::uint32_t mantissa = value & 0x3FF;
    if (exponent == 0x1F) return to_float(sign | 0x7F800000 | mantissa << 13);
    if (exponent == 0) return to_float(sign | to_bits(float(mantissa) * 0x1p-24f));
    return to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline std::uint16_t to_float16(float value) {
    const std::uint32_t sign = to_bits(value) >> 16 & 0x8000;
    const std::uint32_t bits = to_bits(value) & 0x7FFFFFFF;
    std::uint32_t half = 0;
    if (bits > 0x7F800000) {
        half = 0x7E00;
    } else if (bits >= 0x477FF000) {  // 65520 and more round to infinity
        half = 0x7C00;
    } else if (bits < 0x38800000) {
        // Below the smallest normal number: in the sum the last bit of the mantissa stands for 2^-24.
        half = to_bits(to_float(bits) + 0.5f) - to_bits(0.5f);
    } else {
        half = (bits + 0xFFF + ((bits >> 13) & 1) - (112u << 23)) >> 13;
    }
    return std::uint16_t(sign | half);
}

}  // namespace lastgood

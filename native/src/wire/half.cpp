#include "wire/half.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lastgood {
namespace {

float to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

std::uint32_t to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float from_bfloat16(std::uint16_t value) { return to_float(std::uint32_t(value) << 16); }

std::uint16_t to_bfloat16(float value) {
    const std::uint32_t bits = to_bits(value);
    const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return value != value ? std::uint16_t(0x7FC0) : std::uint16_t(rounded);
}

float from_float16(std::uint16_t value) {
    const std::uint32_t sign = std::uint32_t(value & 0x8000) << 16;
    const std::uint32_t exponent = (value >> 10) & 0x1F;
    const std::uint32_t mantissa = value & 0x3FF;
    if (exponent == 0x1F) return to_float(sign | 0x7F800000 | mantissa << 13);
    if (exponent == 0) return to_float(sign | to_bits(float(mantissa) * 0x1p-24f));
    return to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

std::uint16_t to_float16(float value) {
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

void add_float16_portable(std::uint16_t* target, const std::uint16_t* source, std::size_t elements) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_float16(from_float16(source[index]) + from_float16(target[index]));
}

void divide_float16_portable(std::uint16_t* target, std::size_t elements, float divisor) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_float16(from_float16(target[index]) / divisor);
}

#if defined(__x86_64__)

bool has_f16c() {
    static const bool found = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
    return found;
}

__attribute__((target("avx,f16c"))) __m256 load_halves(const std::uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

__attribute__((target("avx,f16c"))) void store_halves(std::uint16_t* at, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// Return how many elements are done; the portable way takes the rest.
__attribute__((target("avx,f16c"))) std::size_t add_float16_f16c(std::uint16_t* target, const std::uint16_t* source,
                                                                 std::size_t elements) {
    std::size_t index = 0;
    for (; index + 8 <= elements; index += 8)
        store_halves(target + index, _mm256_add_ps(load_halves(source + index), load_halves(target + index)));
    return index;
}

__attribute__((target("avx,f16c"))) std::size_t divide_float16_f16c(std::uint16_t* target, std::size_t elements,
                                                                    float divisor) {
    std::size_t index = 0;
    const __m256 by = _mm256_set1_ps(divisor);
    for (; index + 8 <= elements; index += 8)
        store_halves(target + index, _mm256_div_ps(load_halves(target + index), by));
    return index;
}

#endif

}  // namespace

void add_float16(std::uint16_t* target, const std::uint16_t* source, std::size_t elements) {
    std::size_t done = 0;
#if defined(__x86_64__)
    if (has_f16c()) done = add_float16_f16c(target, source, elements);
#endif
    add_float16_portable(target + done, source + done, elements - done);
}

void divide_float16(std::uint16_t* target, std::size_t elements, float divisor) {
    std::size_t done = 0;
#if defined(__x86_64__)
    if (has_f16c()) done = divide_float16_f16c(target, elements, divisor);
#endif
    divide_float16_portable(target + done, elements - done, divisor);
}

void add_bfloat16(std::uint16_t* target, const std::uint16_t* source, std::size_t elements) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_bfloat16(from_bfloat16(source[index]) + from_bfloat16(target[index]));
}

void divide_bfloat16(std::uint16_t* target, std::size_t elements, float divisor) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_bfloat16(from_bfloat16(target[index]) / divisor);
}

}  // namespace lastgood

#include "sparse/compress_kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "optim/arithmetic.hpp"
#include "wire/half_bits.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lastgood {
namespace {

constexpr std::size_t kAhead = 1024;  // elements on their way into the cache, across the ends of pages

// ---------------------------------------------------------------------------------------------------------------------
// Bodies that become vectors by themselves, inlined into a function for each instruction set.

LASTGOOD_INLINE void sum_float32(const void* gradient, const float* residual, float* strip, std::size_t count) {
    const auto* from = static_cast<const float*>(gradient);
    if (residual == nullptr)
        std::memcpy(strip, from, count * sizeof(float));
    else
        for (std::size_t i = 0; i < count; ++i) strip[i] = from[i] + residual[i];
}

LASTGOOD_INLINE void sum_bfloat16(const void* gradient, const float* residual, float* strip, std::size_t count) {
    const auto* from = static_cast<const std::uint16_t*>(gradient);
    for (std::size_t i = 0; i < count; ++i) strip[i] = from_bfloat16(from[i]);
    if (residual != nullptr)
        for (std::size_t i = 0; i < count; ++i) strip[i] += residual[i];
}

LASTGOOD_INLINE Weight largest_weight(const float* strip, std::size_t count) {
    std::int32_t most = 0;
    for (std::size_t i = 0; i < count; ++i) most = std::max(most, std::int32_t(to_bits(strip[i]) & kMagnitude));
    return Weight(most);
}

// ---------------------------------------------------------------------------------------------------------------------
// Portable

void sum_float32_portable(const void* gradient, const float* residual, float* strip, std::size_t count) {
    sum_float32(gradient, residual, strip, count);
}

void sum_float16_portable(const void* gradient, const float* residual, float* strip, std::size_t count) {
    const auto* from = static_cast<const std::uint16_t*>(gradient);
    for (std::size_t i = 0; i < count; ++i)
        strip[i] = residual == nullptr ? from_float16(from[i]) : from_float16(from[i]) + residual[i];
}

void sum_bfloat16_portable(const void* gradient, const float* residual, float* strip, std::size_t count) {
    sum_bfloat16(gradient, residual, strip, count);
}

Weight largest_portable(const float* strip, std::size_t count) { return largest_weight(strip, count); }

Found single_portable(const float* strip, std::size_t count, std::uint32_t first, Weight bound, std::uint32_t* indices,
                      float* values) {
    Found found{0, 0};
    for (std::size_t i = 0; i < count; ++i) {
        const Weight weight = to_bits(strip[i]) & kMagnitude;
        if (weight < bound) continue;
        if (weight == bound) {
            ++found.equal;
            continue;
        }
        indices[found.above] = first + std::uint32_t(i);
        values[found.above++] = strip[i];
    }
    return found;
}

Found blocks_portable(const float* strip, std::size_t count, std::uint32_t first, Weight bound, std::uint32_t* indices,
                      Weight* weights, float* values) {
    Found found{0, 0};
    for (std::size_t block = 0; block < count; ++block) {
        const float* own = strip + block * kBlockWidth;
        const Weight weight = block_weight(own, kBlockWidth);
        if (weight < bound) continue;
        if (weight == bound) {
            ++found.equal;
            continue;
        }
        indices[found.above] = first + std::uint32_t(block);
        weights[found.above] = weight;
        std::memcpy(values + found.above++ * kBlockWidth, own, kBlockWidth * sizeof(float));
    }
    return found;
}

std::size_t keep_portable(const std::uint32_t* indices, const float* values, std::size_t count, Weight least,
                          std::uint32_t* kept_indices, float* kept_values) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if ((to_bits(values[i]) & kMagnitude) < least) continue;
        kept_indices[kept] = indices[i];
        kept_values[kept++] = values[i];
    }
    return kept;
}

void sum_stream_portable(const float* gradient, const float* residual, float* strip, std::size_t count, float* target,
                         Weight heavy) {
    for (std::size_t i = 0; i < count; ++i) strip[i] = gradient[i] + residual[i];
    for (std::size_t i = 0; i < count; ++i) target[i] = (to_bits(strip[i]) & kMagnitude) < heavy ? strip[i] : 0.0f;
}

void streamed_portable() {}

bool add_portable(const float* gradient, const float* residual, std::size_t count, float* target) {
    bool finite = true;
    for (std::size_t i = 0; i < count; ++i) {
        const float sum = gradient[i] + residual[i];
        if ((to_bits(sum) & kMagnitude) < kInfinity)
            target[i] = sum;
        else
            finite = false;
    }
    return finite;
}

constexpr CompressKernels kPortable{{sum_float32_portable, sum_float16_portable, sum_bfloat16_portable},
                                    sum_stream_portable,
                                    streamed_portable,
                                    add_portable,
                                    largest_portable,
                                    single_portable,
                                    blocks_portable,
                                    keep_portable};

#if defined(__x86_64__)

#define LASTGOOD_AVX2 __attribute__((target("avx2,fma,f16c")))
#define LASTGOOD_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))

// ---------------------------------------------------------------------------------------------------------------------
// AVX2, and what is the same in AVX-512

LASTGOOD_AVX2 void sum_float32_avx2(const void* gradient, const float* residual, float* strip, std::size_t count) {
    sum_float32(gradient, residual, strip, count);
}

LASTGOOD_AVX2 void sum_float16_avx2(const void* gradient, const float* residual, float* strip, std::size_t count) {
    const auto* from = static_cast<const std::uint16_t*>(gradient);
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 value = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        if (residual != nullptr) value = _mm256_add_ps(value, _mm256_loadu_ps(residual + i));
        _mm256_storeu_ps(strip + i, value);
    }
    sum_float16_portable(from + i, residual == nullptr ? nullptr : residual + i, strip + i, count - i);
}

LASTGOOD_AVX2 void sum_bfloat16_avx2(const void* gradient, const float* residual, float* strip, std::size_t count) {
    sum_bfloat16(gradient, residual, strip, count);
}

LASTGOOD_AVX2 Weight largest_avx2(const float* strip, std::size_t count) { return largest_weight(strip, count); }

// First a list of the sixteens that have a heavy one, without a branch: at one per cent no CPU foresees which those are.
LASTGOOD_AVX2 Found single_avx2(const float* strip, std::size_t count, std::uint32_t first, Weight bound,
                                std::uint32_t* indices, float* values) {
    const __m256i magnitude = _mm256_set1_epi32(int(kMagnitude));
    const __m256i below = _mm256_set1_epi32(int(bound) - 1);
    Found found{0, 0};
    const std::size_t whole = count / 16 * 16;
    for (std::size_t begin = 0; begin < whole; begin += kStripElements) {
        const std::size_t end = std::min(whole, begin + kStripElements);
        std::uint32_t some[kStripElements / 16];
        std::uint16_t masks[kStripElements / 16];
        std::size_t number = 0;
        for (std::size_t i = begin; i < end; i += 16) {
            const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(strip + i));
            const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(strip + i + 8));
            const __m256i heavy_low = _mm256_cmpgt_epi32(_mm256_and_si256(low, magnitude), below);
            const __m256i heavy_high = _mm256_cmpgt_epi32(_mm256_and_si256(high, magnitude), below);
            const unsigned mask = unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(heavy_low))) |
                                  unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(heavy_high))) << 8;
            some[number] = std::uint32_t(i);
            masks[number] = std::uint16_t(mask);
            number += mask != 0;
        }
        for (std::size_t one = 0; one < number; ++one) {
            for (unsigned mask = masks[one]; mask != 0; mask &= mask - 1) {
                const std::size_t at = some[one] + std::size_t(__builtin_ctz(mask));
                const bool above = (to_bits(strip[at]) & kMagnitude) > bound;
                indices[found.above] = first + std::uint32_t(at);
                values[found.above] = strip[at];
                found.above += above;
                found.equal += !above;
            }
        }
    }
    const Found rest = single_portable(strip + whole, count - whole, first + std::uint32_t(whole), bound,
                                       indices + found.above, values + found.above);
    return {found.above + rest.above, found.equal + rest.equal};
}

__attribute__((target("avx2"), always_inline)) inline __m256 halved(const float* block) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(int(kMagnitude)));
    return _mm256_add_ps(_mm256_and_ps(_mm256_loadu_ps(block), magnitude),
                         _mm256_and_ps(_mm256_loadu_ps(block + 8), magnitude));
}

// Sums of the quarters of two blocks, one in each half.
__attribute__((target("avx2"), always_inline)) inline __m256 quartered(const float* block) {
    const __m256 one = halved(block);
    const __m256 other = halved(block + kBlockWidth);
    return _mm256_add_ps(_mm256_permute2f128_ps(one, other, 0x20), _mm256_permute2f128_ps(one, other, 0x31));
}

// Weights of eight blocks: what `block_weight` gives for each.
__attribute__((target("avx2"), always_inline)) inline __m256i eight_weights(const float* block) {
    __m256 eighths[2];
    for (int half = 0; half < 2; ++half) {
        const __m256 one = quartered(block + half * 4 * kBlockWidth);
        const __m256 other = quartered(block + (half * 4 + 2) * kBlockWidth);
        eighths[half] = _mm256_add_ps(_mm256_shuffle_ps(one, other, 0x44), _mm256_shuffle_ps(one, other, 0xEE));
    }
    const __m256 sums =
        _mm256_add_ps(_mm256_shuffle_ps(eighths[0], eighths[1], 0x88), _mm256_shuffle_ps(eighths[0], eighths[1], 0xDD));
    return _mm256_castps_si256(_mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

LASTGOOD_AVX2 Found blocks_avx2(const float* strip, std::size_t count, std::uint32_t first, Weight bound,
                                std::uint32_t* indices, Weight* weights, float* values) {
    const __m256i below = _mm256_set1_epi32(int(bound) - 1);
    Found found{0, 0};
    std::size_t block = 0;
    for (; block + 8 <= count; block += 8) {
        const __m256i eight = eight_weights(strip + block * kBlockWidth);
        unsigned mask = unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(eight, below))));
        if (mask == 0) continue;
        alignas(32) Weight own[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(own), eight);
        for (; mask != 0; mask &= mask - 1) {
            const std::size_t lane = std::size_t(__builtin_ctz(mask));
            if (own[lane] == bound) {
                ++found.equal;
                continue;
            }
            indices[found.above] = first + std::uint32_t(block + lane);
            weights[found.above] = own[lane];
            std::memcpy(values + found.above++ * kBlockWidth, strip + (block + lane) * kBlockWidth,
                        kBlockWidth * sizeof(float));
        }
    }
    const Found rest = blocks_portable(strip + block * kBlockWidth, count - block, first + std::uint32_t(block), bound,
                                       indices + found.above, weights + found.above, values + found.above * kBlockWidth);
    return {found.above + rest.above, found.equal + rest.equal};
}

LASTGOOD_AVX2 void sum_stream_avx2(const float* gradient, const float* residual, float* strip, std::size_t count,
                                   float* target, Weight heavy) {
    const __m256i magnitude = _mm256_set1_epi32(int(kMagnitude));
    const __m256i limit = _mm256_set1_epi32(int(heavy > kMagnitude ? kMagnitude : heavy - 1));
    for (std::size_t i = 0; i < count; i += 8) {
        const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(gradient + i), _mm256_loadu_ps(residual + i));
        const __m256i out = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(sum), magnitude), limit);
        _mm256_storeu_ps(strip + i, sum);
        _mm256_stream_ps(target + i, _mm256_andnot_ps(_mm256_castsi256_ps(out), sum));
    }
}

void streamed_x86() { _mm_sfence(); }

LASTGOOD_AVX2 bool add_avx2(const float* gradient, const float* residual, std::size_t count, float* target) {
    const __m256i magnitude = _mm256_set1_epi32(int(kMagnitude));
    const __m256i largest = _mm256_set1_epi32(int(kInfinity) - 1);
    bool finite = true;
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        _mm_prefetch(reinterpret_cast<const char*>(gradient + i + kAhead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(residual + i + kAhead), _MM_HINT_T0);
        const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(gradient + i), _mm256_loadu_ps(residual + i));
        const __m256i weight = _mm256_and_si256(_mm256_castps_si256(sum), magnitude);
        if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpgt_epi32(weight, largest)) != 0, 0))
            finite = add_portable(gradient + i, residual + i, 8, target + i) && finite;
        else
            _mm256_storeu_ps(target + i, sum);
    }
    return add_portable(gradient + i, residual + i, count - i, target + i) && finite;
}

constexpr CompressKernels kAvx2{{sum_float32_avx2, sum_float16_avx2, sum_bfloat16_avx2},
                                sum_stream_avx2,
                                streamed_x86,
                                add_avx2,
                                largest_avx2,
                                single_avx2,
                                blocks_avx2,
                                keep_portable};

// ---------------------------------------------------------------------------------------------------------------------
// AVX-512

LASTGOOD_AVX512 void sum_float32_avx512(const void* gradient, const float* residual, float* strip, std::size_t count) {
    sum_float32(gradient, residual, strip, count);
}

LASTGOOD_AVX512 void sum_float16_avx512(const void* gradient, const float* residual, float* strip, std::size_t count) {
    const auto* from = static_cast<const std::uint16_t*>(gradient);
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512 value = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
        if (residual != nullptr) value = _mm512_add_ps(value, _mm512_loadu_ps(residual + i));
        _mm512_storeu_ps(strip + i, value);
    }
    sum_float16_portable(from + i, residual == nullptr ? nullptr : residual + i, strip + i, count - i);
}

LASTGOOD_AVX512 void sum_bfloat16_avx512(const void* gradient, const float* residual, float* strip, std::size_t count) {
    sum_bfloat16(gradient, residual, strip, count);
}

LASTGOOD_AVX512 Weight largest_avx512(const float* strip, std::size_t count) { return largest_weight(strip, count); }

LASTGOOD_AVX512 Found single_avx512(const float* strip, std::size_t count, std::uint32_t first, Weight bound,
                                    std::uint32_t* indices, float* values) {
    const __m512i magnitude = _mm512_set1_epi32(int(kMagnitude));
    const __m512i bounds = _mm512_set1_epi32(int(bound));
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Found found{0, 0};
    const std::size_t whole = count / 16 * 16;
    for (std::size_t begin = 0; begin < whole; begin += kStripElements) {
        const std::size_t end = std::min(whole, begin + kStripElements);
        std::uint32_t some[kStripElements / 16];
        std::size_t number = 0;
        for (std::size_t i = begin; i < end; i += 16) {
            const __m512i weight = _mm512_and_si512(_mm512_loadu_si512(strip + i), magnitude);
            some[number] = std::uint32_t(i);
            number += _mm512_cmpge_epu32_mask(weight, bounds) != 0;
        }
        for (std::size_t one = 0; one < number; ++one) {
            const std::uint32_t i = some[one];
            const __m512i value = _mm512_loadu_si512(strip + i);
            const __m512i weight = _mm512_and_si512(value, magnitude);
            const __mmask16 heavy = _mm512_cmpge_epu32_mask(weight, bounds);
            const __mmask16 above = _mm512_cmpgt_epu32_mask(weight, bounds);
            const __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(int(first + i)), lanes);
            // Through a register: the form that stores only what is chosen takes a hundred cycles on some CPUs.
            _mm512_storeu_si512(indices + found.above, _mm512_maskz_compress_epi32(above, numbers));
            _mm512_storeu_si512(values + found.above, _mm512_maskz_compress_epi32(above, value));
            const auto stored = std::size_t(__builtin_popcount(above));
            found.above += stored;
            found.equal += std::size_t(__builtin_popcount(heavy)) - stored;
        }
    }
    const Found rest = single_portable(strip + whole, count - whole, first + std::uint32_t(whole), bound,
                                       indices + found.above, values + found.above);
    return {found.above + rest.above, found.equal + rest.equal};
}

LASTGOOD_AVX512 Found blocks_avx512(const float* strip, std::size_t count, std::uint32_t first, Weight bound,
                                    std::uint32_t* indices, Weight* weights, float* values) {
    const __m256i bounds = _mm256_set1_epi32(int(bound));
    Found found{0, 0};
    std::size_t block = 0;
    for (; block + 8 <= count; block += 8) {
        const __m256i eight = eight_weights(strip + block * kBlockWidth);
        unsigned heavy = _mm256_cmpge_epu32_mask(eight, bounds);
        if (heavy == 0) continue;
        unsigned above = _mm256_cmpgt_epu32_mask(eight, bounds);
        found.equal += std::size_t(__builtin_popcount(heavy) - __builtin_popcount(above));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + found.above),
                            _mm256_maskz_compress_epi32(__mmask8(above), eight));
        for (; above != 0; above &= above - 1) {
            const std::size_t chosen = block + std::size_t(__builtin_ctz(above));
            indices[found.above] = first + std::uint32_t(chosen);
            _mm512_storeu_ps(values + found.above++ * kBlockWidth, _mm512_loadu_ps(strip + chosen * kBlockWidth));
        }
    }
    const Found rest = blocks_portable(strip + block * kBlockWidth, count - block, first + std::uint32_t(block), bound,
                                       indices + found.above, weights + found.above, values + found.above * kBlockWidth);
    return {found.above + rest.above, found.equal + rest.equal};
}

LASTGOOD_AVX512 void sum_stream_avx512(const float* gradient, const float* residual, float* strip, std::size_t count,
                                       float* target, Weight heavy) {
    const __m512i magnitude = _mm512_set1_epi32(int(kMagnitude));
    const __m512i limit = _mm512_set1_epi32(int(heavy));
    for (std::size_t i = 0; i < count; i += 16) {
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(gradient + i), _mm512_loadu_ps(residual + i));
        const __mmask16 kept = _mm512_cmplt_epu32_mask(_mm512_and_si512(_mm512_castps_si512(sum), magnitude), limit);
        _mm512_storeu_ps(strip + i, sum);
        _mm512_stream_ps(target + i, _mm512_maskz_mov_ps(kept, sum));
    }
}

LASTGOOD_AVX512 bool add_avx512(const float* gradient, const float* residual, std::size_t count, float* target) {
    const __m512i magnitude = _mm512_set1_epi32(int(kMagnitude));
    const __m512i infinity = _mm512_set1_epi32(int(kInfinity));
    bool finite = true;
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        _mm_prefetch(reinterpret_cast<const char*>(gradient + i + kAhead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(residual + i + kAhead), _MM_HINT_T0);
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(gradient + i), _mm512_loadu_ps(residual + i));
        const __m512i weight = _mm512_and_si512(_mm512_castps_si512(sum), magnitude);
        if (__builtin_expect(_mm512_cmpge_epu32_mask(weight, infinity) != 0, 0))
            finite = add_portable(gradient + i, residual + i, 16, target + i) && finite;
        else
            _mm512_storeu_ps(target + i, sum);
    }
    return add_portable(gradient + i, residual + i, count - i, target + i) && finite;
}

LASTGOOD_AVX512 std::size_t keep_avx512(const std::uint32_t* indices, const float* values, std::size_t count, Weight least,
                                        std::uint32_t* kept_indices, float* kept_values) {
    const __m512i magnitude = _mm512_set1_epi32(int(kMagnitude));
    const __m512i limit = _mm512_set1_epi32(int(least));
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count; i += 16) {
        const std::size_t left = count - i;
        const __mmask16 there = left < 16 ? __mmask16((1u << left) - 1) : __mmask16(0xFFFF);
        const __m512i value = _mm512_maskz_loadu_epi32(there, values + i);
        const __m512i index = _mm512_maskz_loadu_epi32(there, indices + i);
        const __mmask16 chosen = _mm512_mask_cmpge_epu32_mask(there, _mm512_and_si512(value, magnitude), limit);
        const auto number = unsigned(__builtin_popcount(chosen));
        // Through a register, as above; and no further than there is room.
        const auto stored = __mmask16((1u << number) - 1);
        _mm512_mask_storeu_epi32(kept_indices + kept, stored, _mm512_maskz_compress_epi32(chosen, index));
        _mm512_mask_storeu_epi32(kept_values + kept, stored, _mm512_maskz_compress_epi32(chosen, value));
        kept += number;
    }
    return kept;
}

constexpr CompressKernels kAvx512{{sum_float32_avx512, sum_float16_avx512, sum_bfloat16_avx512},
                                  sum_stream_avx512,
                                  streamed_x86,
                                  add_avx512,
                                  largest_avx512,
                                  single_avx512,
                                  blocks_avx512,
                                  keep_avx512};

bool has_f16c() {
    static const bool found = __builtin_cpu_supports("f16c");
    return found;
}

#endif

// The largest number of float16 that leaves an exact rest: a multiple of the value's own last bit.
std::uint32_t largest_half(std::uint32_t magnitude) {
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint32_t shift = exponent <= 150 ? 0 : std::min(exponent - 150, 16u);
    return 65504u >> shift << shift;
}

}  // namespace

const CompressKernels& compress_kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (has_f16c()) {
        if (set == InstructionSet::avx512) return kAvx512;
        if (set == InstructionSet::avx2) return kAvx2;
    }
#endif
    (void)set;
    return kPortable;
}

Weight block_weight(const float* values, std::size_t count) {
    float sums[kBlockWidth] = {};
    for (std::size_t i = 0; i < count; ++i) sums[i] = std::fabs(values[i]);
    for (std::size_t half = kBlockWidth / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
    if (count < kBlockWidth) sums[0] *= float(double(kBlockWidth) / double(count));
    return to_bits(sums[0]);
}

float narrowed(float value, SparseType type, std::uint16_t* stored) {
    if (type == SparseType::float32) return value;
    const std::uint32_t bits = to_bits(value);
    if (type == SparseType::bfloat16) {
        std::uint16_t half = to_bfloat16(value);
        if ((half & 0x7FFF) == 0x7F80) half = std::uint16_t(bits >> 16);
        *stored = half;
        return from_bfloat16(half);
    }
    std::uint16_t half = to_float16(value);
    if ((half & 0x7FFF) == 0x7C00) {
        const float most = float(largest_half(bits & kMagnitude));
        half = to_float16(to_float(to_bits(most) | (bits & ~kMagnitude)));
    }
    *stored = half;
    return from_float16(half);
}

float widened(const void* from, SparseType type, std::size_t at) {
    if (type == SparseType::float32) return static_cast<const float*>(from)[at];
    const std::uint16_t stored = static_cast<const std::uint16_t*>(from)[at];
    return type == SparseType::float16 ? from_float16(stored) : from_bfloat16(stored);
}

}  // namespace lastgood

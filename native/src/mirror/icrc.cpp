#include "mirror/icrc.hpp"

#include <cstring>

#include "reflected_crc.hpp"

namespace lastgood::mirror {
namespace {

using Crc32 = ReflectedCrc<0xEDB88320u>;

#if defined(__x86_64__)

#define LASTGOOD_CLMUL __attribute__((target("sse4.1,pclmul")))
#define LASTGOOD_VCLMUL __attribute__((target("sse4.1,pclmul,avx512f,avx512bw,avx512vl,vpclmulqdq")))

struct AllFactors {
    Crc32::FoldFactors by_16{128}, by_64{512}, by_256{2048};
};

const AllFactors& factors() {
    static const AllFactors all;
    return all;
}

LASTGOOD_CLMUL inline __m128i load(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }

LASTGOOD_CLMUL inline __m128i fold(__m128i value, __m128i by, __m128i next) {
    const __m128i first = _mm_clmulepi64_si128(value, by, 0x00);
    const __m128i last = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, last), next);
}

// The register after the 16 bytes that `value` stands for.
LASTGOOD_CLMUL inline std::uint32_t reduce(__m128i value) {
    std::uint8_t bytes[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), value);
    return Crc32::update_by_tables(bytes, sizeof bytes, 0);
}

LASTGOOD_CLMUL std::uint32_t update_clmul(const std::uint8_t* at, std::size_t nbytes, std::uint32_t crc) {
    if (nbytes < 64) return Crc32::update_by_tables(at, nbytes, crc);
    const AllFactors& all = factors();
    const __m128i by_64 = load(all.by_64.words), by_16 = load(all.by_16.words);
    __m128i lane[4] = {load(at), load(at + 16), load(at + 32), load(at + 48)};
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128(int(crc)));
    at += 64;
    nbytes -= 64;
    for (; nbytes >= 64; at += 64, nbytes -= 64) {
        for (int number = 0; number < 4; ++number) lane[number] = fold(lane[number], by_64, load(at + 16 * number));
    }
    __m128i value = lane[0];
    for (int number = 1; number < 4; ++number) value = fold(value, by_16, lane[number]);
    for (; nbytes >= 16; at += 16, nbytes -= 16) value = fold(value, by_16, load(at));
    return Crc32::update_by_tables(at, nbytes, reduce(value));
}

std::uint32_t sum_clmul(const void* data, std::size_t nbytes, std::uint32_t seed) {
    return ~update_clmul(static_cast<const std::uint8_t*>(data), nbytes, ~seed);
}

LASTGOOD_VCLMUL std::uint32_t sum_vclmul(const void* data, std::size_t nbytes, std::uint32_t seed) {
    const auto* at = static_cast<const std::uint8_t*>(data);
    std::uint32_t crc = ~seed;
    if (nbytes < 512) return ~update_clmul(at, nbytes, crc);
    const AllFactors& all = factors();
    const __m128i by_16 = load(all.by_16.words);
    const __m512i by_256 = _mm512_broadcast_i32x4(load(all.by_256.words));
    const __m512i by_64 = _mm512_broadcast_i32x4(load(all.by_64.words));
    __m512i lane[4];
    for (int number = 0; number < 4; ++number) lane[number] = _mm512_loadu_si512(at + 64 * number);
    lane[0] = _mm512_xor_si512(lane[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
    at += 256;
    nbytes -= 256;
    for (; nbytes >= 256; at += 256, nbytes -= 256) {
        for (int number = 0; number < 4; ++number)
            lane[number] = fold_wide(lane[number], by_256, _mm512_loadu_si512(at + 64 * number));
    }
    __m512i wide = lane[0];
    for (int number = 1; number < 4; ++number) wide = fold_wide(wide, by_64, lane[number]);
    for (; nbytes >= 64; at += 64, nbytes -= 64) wide = fold_wide(wide, by_64, _mm512_loadu_si512(at));
    __m128i parts[4];
    _mm512_storeu_si512(parts, wide);
    __m128i value = parts[0];
    for (int number = 1; number < 4; ++number) value = fold(value, by_16, parts[number]);
    for (; nbytes >= 16; at += 16, nbytes -= 16) value = fold(value, by_16, load(at));
    return ~Crc32::update_by_tables(at, nbytes, reduce(value));
}

#endif

std::vector<Crc32Variant> detect_variants() {
    std::vector<Crc32Variant> variants;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool clmul = __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("pclmul");
    if (clmul && cpu_folds_wide()) variants.push_back({"vclmul", sum_vclmul});
    if (clmul) variants.push_back({"clmul", sum_clmul});
#endif
    variants.push_back({"portable", Crc32::sum_portable});
    return variants;
}

constexpr std::size_t kUdpBytes = 8, kBthBytes = 12, kBthOnes = 4;
constexpr std::size_t kShortHead = 128;

std::uint32_t icrc_from(std::uint8_t* head, std::size_t head_bytes, const std::uint8_t* rest, std::size_t nbytes,
                        std::size_t udp) {
    if (head[0] >> 4 == 6) {
        head[0] |= 0x0F;
        head[1] = head[2] = head[3] = head[7] = 0xFF;
    } else {
        head[1] = head[8] = head[10] = head[11] = 0xFF;
    }
    head[udp + 6] = head[udp + 7] = 0xFF;
    head[udp + kUdpBytes + kBthOnes] = 0xFF;
    static const Crc32Variant& fastest = crc32_variants().front();
    static const std::uint32_t ones = Crc32::sum_portable("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, 0);
    return fastest.sum(rest, nbytes, fastest.sum(head, head_bytes, ones));
}

}  // namespace

const std::vector<Crc32Variant>& crc32_variants() {
    static const std::vector<Crc32Variant> variants = detect_variants();
    return variants;
}

const Crc32Variant& crc32_variant(const std::string& name) {
    return variant_named(crc32_variants(), name, "CRC-32");
}

std::uint32_t icrc(const std::uint8_t* packet, std::size_t nbytes, std::size_t udp) {
    const std::size_t head_bytes = udp + kUdpBytes + kBthBytes;
    if (head_bytes <= kShortHead) {
        std::uint8_t head[kShortHead];
        std::memcpy(head, packet, head_bytes);
        return icrc_from(head, head_bytes, packet + head_bytes, nbytes - head_bytes, udp);
    }
    std::vector<std::uint8_t> head(packet, packet + head_bytes);
    return icrc_from(head.data(), head_bytes, packet + head_bytes, nbytes - head_bytes, udp);
}

}  // namespace lastgood::mirror

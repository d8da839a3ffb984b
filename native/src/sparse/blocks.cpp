#include "sparse/blocks.hpp"

#include <algorithm>
#include <cstring>

#include "sparse/indices.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kHeaderBytes = 32;
constexpr unsigned char kMagic[4] = {'L', 'G', 'S', 'B'};
constexpr unsigned kVersion = 1;
constexpr unsigned kNotFinite = 1;
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 32;
constexpr unsigned kWidth = 16;

std::uint64_t aligned(std::uint64_t at) { return (at + kBlockAlign - 1) / kBlockAlign * kBlockAlign; }

// Bytes of one value; 0 for a type that no block has.
std::uint64_t item_bytes(unsigned type) { return type == 1 ? 4 : type == 3 || type == 4 ? 2 : 0; }

std::uint64_t places_of(std::uint64_t elements, unsigned width) { return (elements + width - 1) / width; }

// The shortest coding; of equal ones the first.
IndexCoding shortest(std::uint64_t places, std::uint64_t count) {
    if (count == places) return IndexCoding::all;
    IndexCoding best = IndexCoding::bits;
    for (const IndexCoding coding : {IndexCoding::low_8, IndexCoding::low_16, IndexCoding::numbers})
        if (index_bytes(coding, places, count) < index_bytes(best, places, count)) best = coding;
    return best;
}

bool sized(std::uint64_t elements, unsigned width, unsigned type, std::uint64_t count, bool finite) {
    return elements > 0 && elements <= kMostElements && (width == 1 || width == kWidth) && item_bytes(type) != 0 &&
           count <= places_of(elements, width) && (finite || count == 0);
}

std::uint64_t block_bytes(const SparsePart& part) {
    const std::uint64_t places = places_of(part.elements, part.width);
    return kHeaderBytes + item_bytes(part.type) * part.width * part.count +
           index_bytes(shortest(places, part.count), places, part.count);
}

template <class Bits>
bool all_finite(const void* values, std::uint64_t count, Bits exponent) {
    const auto* const from = static_cast<const unsigned char*>(values);
    unsigned found = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
        found |= unsigned((bits & exponent) == exponent);
    }
    return found == 0;
}

// Zero of either sign.
bool all_zero(const void* values, unsigned type, std::uint64_t from, std::uint64_t to) {
    const std::uint64_t item = item_bytes(type);
    const auto* const bytes = static_cast<const unsigned char*>(values);
    for (std::uint64_t i = from; i < to; ++i)
        for (std::uint64_t byte = 0; byte < item; ++byte) {
            const unsigned char sign = byte + 1 == item ? 0x80 : 0;  // little-endian, as blocks are
            if ((bytes[i * item + byte] & ~sign) != 0) return false;
        }
    return true;
}

bool valid(const std::uint32_t* indices, const void* values, std::uint64_t count, unsigned type, unsigned width,
           std::uint64_t elements) {
    if (count == 0) return true;
    unsigned descending = 0;
    for (std::uint64_t i = 1; i < count; ++i) descending |= unsigned(indices[i] <= indices[i - 1]);
    const std::uint64_t last = indices[count - 1];
    if (descending != 0 || last >= places_of(elements, width)) return false;
    const std::uint64_t number = count * width;
    const bool finite = type == 1   ? all_finite<std::uint32_t>(values, number, 0x7F800000)
                        : type == 3 ? all_finite<std::uint16_t>(values, number, 0x7C00)
                                    : all_finite<std::uint16_t>(values, number, 0x7F80);
    if (!finite) return false;
    const std::uint64_t end = (last + 1) * width;
    return end <= elements || all_zero(values, type, number - (end - elements), number);
}

void store(std::uint8_t* target, std::uint64_t value) {
    for (unsigned byte = 0; byte < 8; ++byte) target[byte] = std::uint8_t(value >> (8 * byte));
}

std::uint64_t load(const std::uint8_t* source) {
    std::uint64_t value = 0;
    for (unsigned byte = 0; byte < 8; ++byte) value |= std::uint64_t{source[byte]} << (8 * byte);
    return value;
}

}  // namespace

std::uint64_t group_bytes(const std::vector<SparsePart>& parts) {
    std::uint64_t end = 0;
    for (const SparsePart& part : parts) {
        if (!sized(part.elements, part.width, part.type, part.count, part.finite)) return 0;
        end = aligned(end) + block_bytes(part);
    }
    return end;
}

bool write_group(const std::vector<SparsePart>& parts, std::uint8_t* target) {
    std::uint64_t end = 0;
    for (const SparsePart& part : parts) {
        if (!valid(part.indices, part.values, part.count, part.type, part.width, part.elements)) return false;
        const std::uint64_t begin = aligned(end), places = places_of(part.elements, part.width);
        std::memset(target + end, 0, begin - end);
        std::uint8_t* const header = target + begin;
        const IndexCoding coding = shortest(places, part.count);
        std::memset(header, 0, kHeaderBytes);
        std::memcpy(header, kMagic, sizeof kMagic);
        header[4] = kVersion;
        header[5] = std::uint8_t(coding);
        header[6] = std::uint8_t(part.type);
        header[7] = std::uint8_t(part.width);
        header[8] = part.finite ? 0 : kNotFinite;
        store(header + 16, part.elements);
        store(header + 24, part.count);
        const std::uint64_t values = item_bytes(part.type) * part.width * part.count;
        if (values != 0) std::memcpy(header + kHeaderBytes, part.values, values);
        write_indices(coding, part.indices, part.count, places, header + kHeaderBytes + values);
        end = begin + block_bytes(part);
    }
    return true;
}

bool find_blocks(const std::uint8_t* source, std::uint64_t nbytes, const std::vector<std::uint64_t>& elements,
                 std::vector<FoundBlock>& found) {
    found.clear();
    if (reinterpret_cast<std::uintptr_t>(source) % sizeof(float) != 0) return false;
    std::uint64_t end = 0;
    for (const std::uint64_t own : elements) {
        const std::uint64_t begin = aligned(end);
        if (begin > nbytes || nbytes - begin < kHeaderBytes) return false;
        if (std::any_of(source + end, source + begin, [](std::uint8_t byte) { return byte != 0; })) return false;
        const std::uint8_t* const header = source + begin;
        if (std::memcmp(header, kMagic, sizeof kMagic) != 0 || header[4] != kVersion || header[5] > 4) return false;
        if (std::any_of(header + 9, header + 16, [](std::uint8_t byte) { return byte != 0; })) return false;
        SparsePart part;
        part.type = header[6];
        part.width = header[7];
        part.finite = (header[8] & kNotFinite) == 0;
        part.elements = load(header + 16);
        part.count = load(header + 24);
        if ((header[8] & ~kNotFinite) != 0 || part.elements != own) return false;
        if (!sized(part.elements, part.width, part.type, part.count, part.finite)) return false;
        const auto coding = IndexCoding(header[5]);
        const std::uint64_t places = places_of(part.elements, part.width);
        if (coding == IndexCoding::all && part.count != places) return false;
        const std::uint64_t length = kHeaderBytes + item_bytes(part.type) * part.width * part.count +
                                     index_bytes(coding, places, part.count);
        if (length > nbytes - begin) return false;
        found.push_back({begin + kHeaderBytes, part.count, part.type, part.width, part.finite});
        end = begin + length;
    }
    return end == nbytes;
}

bool read_blocks(const std::uint8_t* source, std::uint64_t nbytes, const std::vector<std::uint64_t>& elements,
                 const std::vector<FoundBlock>& found, std::uint32_t* indices) {
    (void)nbytes;
    std::uint64_t at = 0;
    for (std::size_t one = 0; one < found.size(); ++one) {
        const FoundBlock& block = found[one];
        const auto coding = IndexCoding(source[block.values_at - kHeaderBytes + 5]);
        const std::uint8_t* const values = source + block.values_at;
        const std::uint8_t* const coded = values + item_bytes(block.type) * block.width * block.count;
        const std::uint64_t places = places_of(elements[one], block.width);
        if (!read_indices(coding, coded, places, block.count, indices + at)) return false;
        if (!valid(indices + at, values, block.count, block.type, block.width, elements[one])) return false;
        at += block.count;
    }
    return true;
}

}  // namespace lastgood

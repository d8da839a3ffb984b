#include "wire/record.hpp"

#include <cstring>

#include "storage/crc32c.hpp"

namespace lastgood {
namespace {

constexpr unsigned char kMagic[4] = {'L', 'G', 'R', '1'};
constexpr std::uint16_t kVersion = 1;

// Numbers are little-endian whatever the processor is.
template <class Number>
void store(Header& header, std::size_t at, Number value) {
    for (std::size_t byte = 0; byte < sizeof(Number); ++byte)
        header[at + byte] = static_cast<unsigned char>(std::uint64_t(value) >> (8 * byte));
}

template <class Number>
Number load(const Header& header, std::size_t at) {
    std::uint64_t value = 0;
    for (std::size_t byte = 0; byte < sizeof(Number); ++byte) value |= std::uint64_t(header[at + byte]) << (8 * byte);
    return Number(value);
}

bool zero(const Header& header, std::size_t from, std::size_t to) {
    for (std::size_t at = from; at < to; ++at)
        if (header[at] != 0) return false;
    return true;
}

}  // namespace

const char* cause_name(Cause cause) {
    switch (cause) {
        case Cause::wrong_epoch:
            return "wrong_epoch";
        case Cause::wrong_rank:
            return "wrong_rank";
        case Cause::not_final:
            return "not_final";
        case Cause::wrong_bucket:
            return "wrong_bucket";
        case Cause::wrong_dtype:
            return "wrong_dtype";
        case Cause::out_of_range:
            return "out_of_range";
        case Cause::old_iteration:
            return "old_iteration";
        case Cause::duplicate:
            return "duplicate";
        case Cause::overlapping:
            return "overlapping";
        case Cause::fragmented:
            return "fragmented";
        case Cause::damaged_payload:
            return "damaged_payload";
        case Cause::wrong_job:
            return "wrong_job";
        case Cause::damaged_header:
            return "damaged_header";
        case Cause::unknown_version:
            return "unknown_version";
        case Cause::malformed:
            return "malformed";
        case Cause::too_long:
            return "too_long";
        case Cause::truncated:
            return "truncated";
        case Cause::stalled:
            return "stalled";
        case Cause::broken:
            return "broken";
        case Cause::fenced:
            return "fenced";
        case Cause::count:
            break;
    }
    return "";
}

std::uint64_t item_bytes(std::uint8_t dtype) {
    constexpr std::uint64_t kItemBytes[] = {0, 4, 8, 2, 2};
    return dtype < sizeof(kItemBytes) / sizeof(kItemBytes[0]) ? kItemBytes[dtype] : 0;
}

void pack_header(const Record& record, Header& header) {
    header.fill(0);
    std::memcpy(header.data(), kMagic, sizeof(kMagic));
    store(header, 4, kVersion);
    store(header, 6, std::uint8_t(record.kind));
    store(header, 7, record.flags);
    store(header, 8, record.job);
    store(header, 16, record.epoch);
    store(header, 20, record.rank);
    store(header, 24, record.iteration);
    store(header, 32, record.bucket);
    store(header, 36, record.dtype);
    store(header, 40, record.offset);
    store(header, 48, record.length);
    store(header, 52, record.checksum);
    store(header, 60, crc32c(header.data(), 60, 0));
}

Cause parse_header(const Header& header, Record& record) {
    if (!zero(header, 37, 40) || !zero(header, 56, 60)) return Cause::damaged_header;
    if (std::memcmp(header.data(), kMagic, sizeof(kMagic)) != 0) return Cause::damaged_header;
    if (load<std::uint16_t>(header, 4) != kVersion) return Cause::unknown_version;
    if (load<std::uint32_t>(header, 60) != crc32c(header.data(), 60, 0)) return Cause::damaged_header;
    const auto kind = load<std::uint8_t>(header, 6);
    record.flags = load<std::uint8_t>(header, 7);
    record.job = load<std::uint64_t>(header, 8);
    record.epoch = load<std::uint32_t>(header, 16);
    record.rank = load<std::uint32_t>(header, 20);
    record.iteration = load<std::uint64_t>(header, 24);
    record.bucket = load<std::uint32_t>(header, 32);
    record.dtype = load<std::uint8_t>(header, 36);
    record.offset = load<std::uint64_t>(header, 40);
    record.length = load<std::uint32_t>(header, 48);
    record.checksum = load<std::uint32_t>(header, 52);
    const std::uint64_t item = item_bytes(record.dtype);
    if ((kind != std::uint8_t(RecordKind::gradient) && kind != std::uint8_t(RecordKind::end)) ||
        (record.flags & ~kFinal) != 0 || item == 0 || record.iteration >= kMaxIteration)
        return Cause::malformed;
    record.kind = RecordKind(kind);
    if (record.length > kMaxPayloadBytes) return Cause::too_long;
    if (record.length % item != 0 || record.offset % item != 0) return Cause::malformed;
    if (record.kind == RecordKind::end && record.length != 0) return Cause::malformed;
    return Cause::count;
}

}  // namespace lastgood

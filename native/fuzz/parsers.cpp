// The native parsers of mirrored traffic, and the reader of the kernel's blocks, for libFuzzer.
//
// The first byte of an input says which of them reads it. What follows are frames: a byte of marks, two bytes of length
// (little-endian), and so many bytes; kernel blocks are taken as they are. A frame's ICRC can be made right here, as no
// mutation finds it.
#include <linux/if_packet.h>
#include <sanitizer/asan_interface.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "capture/frame.hpp"
#include "capture/packet_blocks.hpp"
#include "mirror/gloo.hpp"
#include "mirror/icrc.hpp"
#include "mirror/ip.hpp"
#include "mirror/roce_parser.hpp"

using lastgood::Frame;
namespace mirror = lastgood::mirror;

namespace {

constexpr std::uint8_t kSeal = 1, kNoChecksum = 2, kEndsBatch = 4, kLonger = 8;
constexpr std::size_t kMostFrames = 4096;
constexpr std::size_t kBlockBytes = 4096;
constexpr std::size_t kGap = 16, kGrain = 8;

// Frames with gaps between them that nobody may read.
struct Batch {
    std::vector<std::uint8_t> data;
    std::vector<Frame> frames;

    Batch() = default;
    Batch(Batch&&) = default;
    Batch(const Batch&) = delete;
    ~Batch() { ASAN_UNPOISON_MEMORY_REGION(data.data(), data.size()); }

    void add(const std::uint8_t* content, std::size_t nbytes, std::size_t length, std::size_t number,
             std::uint32_t flags) {
        frames.push_back({data.size(), std::uint32_t(nbytes), std::uint32_t(length), number, flags, 1});
        data.insert(data.end(), content, content + nbytes);
        data.resize((data.size() + kGap + kGrain - 1) / kGrain * kGrain);
    }

    void close() {
        for (std::size_t row = 0; row < frames.size(); ++row) {
            const std::size_t begin = frames[row].offset + frames[row].captured;
            const std::size_t end = row + 1 < frames.size() ? frames[row + 1].offset : data.size();
            ASAN_POISON_MEMORY_REGION(data.data() + begin, end - begin);
        }
    }
};

// The checksum of what looks like a packet to RoCE's port.
void seal(std::uint8_t* frame, std::size_t size) {
    mirror::IpPacket ip;
    if (mirror::ip_packet(frame, size, size, 1, ip) != mirror::Left::none || ip.protocol != mirror::kUdp) return;
    const std::size_t start = std::size_t(ip.source - frame) - (ip.address_bytes == 16 ? 8 : 12);
    if (ip.captured < ip.begin + 8) return;
    const std::size_t end = ip.begin + mirror::big16(frame + ip.begin + 4);
    if (end > ip.captured || end < ip.begin + 8 + 12 + 4) return;
    const std::uint32_t sum = mirror::icrc(frame + start, end - 4 - start, ip.begin - start);
    std::memcpy(frame + end - 4, &sum, 4);
}

std::vector<Batch> batches(const std::uint8_t* data, std::size_t size) {
    std::vector<Batch> found(1);
    std::size_t at = 0, count = 0;
    while (at + 3 <= size && count++ < kMostFrames) {
        const std::uint8_t marks = data[at];
        std::size_t nbytes = data[at + 1] | std::size_t(data[at + 2]) << 8;
        at += 3;
        nbytes = nbytes < size - at ? nbytes : size - at;
        Batch& batch = found.back();
        batch.add(data + at, nbytes, nbytes + (marks & kLonger ? 40 : 0), count,
                  marks & kNoChecksum ? lastgood::frame_no_checksum : 0);
        if (marks & kSeal) seal(batch.data.data() + batch.frames.back().offset, nbytes);
        at += nbytes;
        if (marks & kEndsBatch) found.emplace_back();
    }
    for (Batch& batch : found) batch.close();
    return found;
}

// Reads every byte that was given, as the extractor does, and looks whether the tables can be.
void look(const mirror::Tables& tables) {
    volatile std::uint8_t all = 0;
    for (const mirror::Piece& piece : tables.pieces) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(piece.address);
        for (std::size_t at = 0; at < piece.nbytes; ++at) all = all ^ bytes[at];
        if (piece.offset + piece.nbytes < piece.offset) std::abort();
    }
    for (const mirror::Lost& lost : tables.lost)
        if (lost.offset + lost.nbytes < lost.offset) std::abort();
}

void read_roce(mirror::RoceProtocol protocol, bool striped, const std::uint8_t* data, std::size_t size) {
    mirror::RoceParser parser(protocol, 16, 1 << 20, striped);
    const std::vector<Batch> all = batches(data, size);
    for (const Batch& batch : all)
        look(parser.feed(batch.data.data(), batch.data.size(), batch.frames.data(), batch.frames.size()).tables);
    look(parser.finish().tables);
}

void read_gloo(const std::uint8_t* data, std::size_t size) {
    mirror::SocketParser parser(mirror::gloo_framing(), {1 << 18, 1 << 20, 1 << 16, 64});
    const auto give = [&parser] {
        mirror::Gather& gather = parser.gather();
        look(gather.tables);
        gather.tables = {};
        gather.opened.clear();
        gather.refused.clear();
    };
    const std::vector<Batch> all = batches(data, size);  // bytes stay until the next call
    for (const Batch& batch : all) {
        parser.feed(batch.data.data(), batch.data.size(), batch.frames.data(), batch.frames.size());
        give();
    }
    parser.finish();
    give();
}

void read_blocks(const std::uint8_t* data, std::size_t size) {
    const std::size_t count = size / kBlockBytes + 1;
    const std::unique_ptr<unsigned char, decltype(&std::free)> memory(
        static_cast<unsigned char*>(std::aligned_alloc(4096, count * kBlockBytes)), &std::free);
    std::memset(memory.get(), 0, count * kBlockBytes);
    std::memcpy(memory.get(), data, size);
    for (std::size_t block = 0; block < count; ++block) {
        auto* head = reinterpret_cast<tpacket_block_desc*>(memory.get() + block * kBlockBytes);
        head->hdr.bh1.block_status |= TP_STATUS_USER;  // the kernel has given it
    }
    lastgood::PacketBlocks blocks(memory.get(), kBlockBytes, count, 1);
    std::vector<Frame> table(32);
    volatile unsigned char all = 0;
    for (std::size_t turn = 0; turn < 8 * count; ++turn) {
        const long rows = blocks.read(-1, table.data(), table.size(), 0);
        for (long row = 0; row < rows; ++row)
            for (std::size_t at = 0; at < table[std::size_t(row)].captured; ++at)
                all = all ^ memory.get()[table[std::size_t(row)].offset + at];
        if (rows <= 0 && !blocks.release()) break;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const std::uint8_t which = data[0] % 6;
    const bool striped = data[0] >= 128;
    ++data, --size;
    switch (which) {
        case 0: read_gloo(data, size); break;
        case 1: read_roce(mirror::RoceProtocol::automatic, striped, data, size); break;
        case 2: read_roce(mirror::RoceProtocol::simple, striped, data, size); break;
        case 3: read_roce(mirror::RoceProtocol::ll, striped, data, size); break;
        case 4: read_roce(mirror::RoceProtocol::ll128, striped, data, size); break;
        default: read_blocks(data, size); break;
    }
    return 0;
}

#include "capture/packet_blocks.hpp"

#include <linux/if_packet.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

namespace lastgood {
namespace {

constexpr std::uint32_t tag_bytes = 4;
constexpr std::uint32_t addresses_bytes = 12;  // of an Ethernet header
constexpr std::uint16_t plain_vlan = 0x8100;
constexpr std::size_t sender_offset = TPACKET_ALIGN(sizeof(tpacket3_hdr));
constexpr double most_wait_s = 600;

std::uint32_t* status_of(unsigned char* block) {
    return &reinterpret_cast<tpacket_block_desc*>(block)->hdr.bh1.block_status;
}

// 0, or the errno that the socket has; reading it clears it.
int wait_for_block(int fd, double timeout_s) {
    pollfd one = {fd, POLLIN | POLLERR, 0};
    const double wait_s = std::min(std::max(timeout_s, 0.0), most_wait_s);
    if (poll(&one, 1, static_cast<int>(std::ceil(wait_s * 1000))) <= 0) return 0;
    if ((one.revents & (POLLERR | POLLHUP | POLLNVAL)) == 0) return 0;
    if ((one.revents & POLLNVAL) != 0) return EBADF;
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
    return error;
}

// Writes the tag between addresses and type, with the addresses moved forward, as they were on the wire.
void restore_tag(unsigned char* frame, const tpacket3_hdr& header) {
    const std::uint16_t type = (header.tp_status & TP_STATUS_VLAN_TPID_VALID) != 0 ? header.hv1.tp_vlan_tpid : plain_vlan;
    const auto tag = static_cast<std::uint16_t>(header.hv1.tp_vlan_tci);
    std::memmove(frame - tag_bytes, frame, addresses_bytes);
    unsigned char* place = frame - tag_bytes + addresses_bytes;
    place[0] = static_cast<unsigned char>(type >> 8);
    place[1] = static_cast<unsigned char>(type);
    place[2] = static_cast<unsigned char>(tag >> 8);
    place[3] = static_cast<unsigned char>(tag);
}

}  // namespace

bool PacketBlocks::begin_block() {
    if (held_ == blocks_) return false;
    unsigned char* block = memory_ + block_ * block_bytes_;
    if ((__atomic_load_n(status_of(block), __ATOMIC_ACQUIRE) & TP_STATUS_USER) == 0) return false;
    tpacket_block_desc head;
    std::memcpy(&head, block, sizeof head);
    open_ = true;
    ++held_;
    left_ = head.hdr.bh1.num_pkts;
    position_ = head.hdr.bh1.offset_to_first_pkt;
    return true;
}

void PacketBlocks::end_block() {
    block_ = (block_ + 1) % blocks_;
    open_ = false;
}

bool PacketBlocks::release() {
    if (oldest() < 0) return false;
    __atomic_store_n(status_of(memory_ + oldest_ * block_bytes_), TP_STATUS_KERNEL, __ATOMIC_RELEASE);
    oldest_ = (oldest_ + 1) % blocks_;
    --held_;
    return true;
}

std::size_t PacketBlocks::walk(Frame* table, std::size_t limit) {
    const std::size_t start = block_ * block_bytes_;
    unsigned char* block = memory_ + start;
    std::size_t count = 0;
    while (left_ > 0 && count < limit) {
        tpacket3_hdr header;
        const bool fits = position_ >= sizeof(tpacket_block_desc) &&
                          position_ + sender_offset + sizeof(sockaddr_ll) <= block_bytes_;
        if (fits) std::memcpy(&header, block + position_, sizeof header);
        // With room for a tag between this header and the frame.
        if (!fits || header.tp_mac < sender_offset + sizeof(sockaddr_ll) + tag_bytes ||
            header.tp_snaplen > most_frame_bytes || position_ + header.tp_mac + header.tp_snaplen > block_bytes_ ||
            (left_ > 1 && header.tp_next_offset < header.tp_mac)) {
            ++counters_.damaged_blocks;
            left_ = 0;
            break;
        }
        sockaddr_ll sender;
        std::memcpy(&sender, block + position_ + sender_offset, sizeof sender);
        std::size_t place = position_ + header.tp_mac;
        Frame row = {0, header.tp_snaplen, header.tp_len, 0, 0, link_};
        if ((header.tp_status & TP_STATUS_VLAN_VALID) != 0 && row.captured >= addresses_bytes) {
            restore_tag(block + place, header);
            place -= tag_bytes;
            row.captured += tag_bytes;
            row.length += tag_bytes;
            row.flags |= frame_vlan_restored;
            ++counters_.vlan_restored;
        }
        row.offset = start + place;
        row.time_ns = std::uint64_t{header.tp_sec} * 1000000000 + header.tp_nsec;
        if ((header.tp_status & TP_STATUS_CSUMNOTREADY) != 0) {
            row.flags |= frame_no_checksum;
            ++counters_.no_checksum;
        }
        if (row.captured < row.length) {
            row.flags |= frame_truncated;
            ++counters_.truncated;
        }
        if (sender.sll_pkttype == PACKET_OUTGOING) {
            row.flags |= frame_own;
            ++counters_.own;
        }
        table[count++] = row;
        ++counters_.frames;
        counters_.bytes += row.captured;
        --left_;
        position_ += header.tp_next_offset;
    }
    return count;
}

long PacketBlocks::read(int fd, Frame* table, std::size_t limit, double timeout_s) {
    for (;;) {
        if (!open_ && !begin_block()) {
            if (fd < 0 || held_ == blocks_) return 0;
            const int error = wait_for_block(fd, timeout_s);
            if (error != 0) return -error;
            if (!begin_block()) return 0;
        }
        const std::size_t count = walk(table, limit);
        if (left_ == 0) end_block();
        if (count > 0) return static_cast<long>(count);
    }
}

}  // namespace lastgood

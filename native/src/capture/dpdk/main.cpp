// lastgood-mirror-dpdk: fills a ring of frames from a port of DPDK. `lastgood mirror dump --dpdk` makes the ring, starts
// this program, reads its counters (a line of JSON each) and ends it with SIGTERM; docs/flowcheck-capture.md.
//
//     lastgood-mirror-dpdk EAL-OPTIONS -- RING-DESCRIPTOR RING-BYTES FRAME-BYTES QUEUES MBUFS DMA IDLE-MS
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "capture/dpdk/copies.hpp"
#include "capture/frame_ring.hpp"

namespace lastgood {
namespace {

constexpr std::uint16_t burst = 64;
constexpr std::uint16_t descriptors = 4096;
constexpr unsigned cache = 256;
constexpr auto report_every = std::chrono::milliseconds(500);
constexpr auto pause_for = std::chrono::microseconds(20);

volatile std::sig_atomic_t stopped = 0;

void on_signal(int) { stopped = 1; }

struct Settings {
    int ring;
    std::size_t ring_bytes;
    std::uint32_t frame_bytes;
    std::uint16_t queues;
    unsigned mbufs;
    unsigned dma;
    std::uint64_t idle_ms;  // end when nothing came for so long; 0: never
};

Settings parse(int count, char** words) {
    if (count != 8) throw std::runtime_error("seven numbers are needed after --; it is started by lastgood mirror dump");
    std::uint64_t numbers[7];
    for (int i = 0; i < 7; ++i) {
        char* end = nullptr;
        numbers[i] = std::strtoull(words[i + 1], &end, 10);
        if (end == words[i + 1] || *end != '\0') throw std::runtime_error(std::string("no number: ") + words[i + 1]);
    }
    if (numbers[3] < 1 || numbers[3] > 64 || numbers[4] < 256 || numbers[2] < 256 || numbers[2] > UINT16_MAX) {
        throw std::runtime_error("queues, buffers or bytes of a frame out of range");
    }
    return {static_cast<int>(numbers[0]),
            numbers[1],
            static_cast<std::uint32_t>(numbers[2]),
            static_cast<std::uint16_t>(numbers[3]),
            static_cast<unsigned>(numbers[4]),
            static_cast<unsigned>(numbers[5]),
            numbers[6]};
}

[[noreturn]] void fail(const char* what, int error) {
    throw std::runtime_error(std::string(what) + ": " + rte_strerror(error < 0 ? -error : error));
}

std::uint16_t begin_port(const Settings& settings) {
    const std::uint16_t port = rte_eth_find_next(0);
    if (port >= RTE_MAX_ETHPORTS) throw std::runtime_error("DPDK found no port; see its own words");
    rte_eth_dev_info info = {};
    if (const int error = rte_eth_dev_info_get(port, &info)) fail("asking the port", error);
    rte_eth_conf configuration = {};
    const std::uint32_t longest = std::min(settings.frame_bytes, info.max_rx_pktlen);
    const std::uint32_t around = RTE_ETHER_HDR_LEN + RTE_ETHER_CRC_LEN;
    configuration.rxmode.mtu = std::min<std::uint32_t>(longest - around, info.max_mtu);
    if (settings.queues > 1) {
        configuration.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
        configuration.rx_adv_conf.rss_conf.rss_hf = (RTE_ETH_RSS_IP | RTE_ETH_RSS_UDP | RTE_ETH_RSS_TCP) &
                                                    info.flow_type_rss_offloads;
    }
    // Some drivers know no port without a queue to send; it is never used.
    const std::uint16_t senders = std::min<std::uint16_t>(settings.queues, info.max_tx_queues);
    if (const int error = rte_eth_dev_configure(port, settings.queues, senders, &configuration)) {
        fail("configuring the port", error);
    }
    const auto room = std::min<std::uint32_t>(settings.frame_bytes + RTE_PKTMBUF_HEADROOM, UINT16_MAX);
    const int socket = rte_eth_dev_socket_id(port);
    rte_mempool* pool = rte_pktmbuf_pool_create("frames", settings.mbufs, cache, 0, static_cast<std::uint16_t>(room),
                                                socket < 0 ? SOCKET_ID_ANY : socket);
    if (pool == nullptr) fail("taking memory for frames", rte_errno);
    // All of a queue's descriptors hold a buffer, and as many again are on their way.
    auto rx = static_cast<std::uint16_t>(std::min<unsigned>(descriptors, settings.mbufs / 2 / settings.queues));
    std::uint16_t tx = 512;
    if (const int error = rte_eth_dev_adjust_nb_rx_tx_desc(port, &rx, &tx)) fail("sizing queues", error);
    for (std::uint16_t queue = 0; queue < settings.queues; ++queue) {
        if (const int error = rte_eth_rx_queue_setup(port, queue, rx, static_cast<unsigned>(SOCKET_ID_ANY), nullptr, pool)) {
            fail("making a queue", error);
        }
    }
    for (std::uint16_t queue = 0; queue < senders; ++queue) {
        if (const int error = rte_eth_tx_queue_setup(port, queue, tx, static_cast<unsigned>(SOCKET_ID_ANY), nullptr)) {
            fail("making a queue", error);
        }
    }
    if (const int error = rte_eth_dev_start(port)) fail("starting the port", error);
    rte_eth_promiscuous_enable(port);  // a file has no such mode
    return port;
}

void report(std::uint16_t port, std::uint64_t frames, std::uint64_t bytes, const Copies::Counters& copies) {
    rte_eth_stats stats = {};
    rte_eth_stats_get(port, &stats);
    std::printf("{\"frames\": %llu, \"bytes\": %llu, \"queue_dropped\": %llu, \"errors\": %llu, \"no_buffer\": %llu, "
                "\"copies_by_dma\": %llu, \"copies_by_cpu\": %llu, \"dma_queue_full\": %llu, \"dma_errors\": %llu}\n",
                static_cast<unsigned long long>(frames), static_cast<unsigned long long>(bytes),
                static_cast<unsigned long long>(stats.imissed), static_cast<unsigned long long>(stats.ierrors),
                static_cast<unsigned long long>(stats.rx_nombuf), static_cast<unsigned long long>(copies.by_dma),
                static_cast<unsigned long long>(copies.by_cpu), static_cast<unsigned long long>(copies.queue_full),
                static_cast<unsigned long long>(copies.dma_errors));
    std::fflush(stdout);
}

std::uint64_t now_ns() {
    timespec time = {};
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1000000000 + static_cast<std::uint64_t>(time.tv_nsec);
}

// One frame, in one segment or several.
void take(FrameRing* ring, Copies* copies, const rte_mbuf* frame, std::uint64_t time_ns) {
    const Frame row = {0, frame->pkt_len, frame->pkt_len, time_ns, 0, 1};
    unsigned char* place = ring->reserve(row, true);
    if (place == nullptr) return;
    for (const rte_mbuf* part = frame; part != nullptr; part = part->next) {
        copies->copy(place, rte_pktmbuf_mtod(part, const void*), rte_pktmbuf_iova(part), part->data_len);
        place += part->data_len;
    }
}

void run(const Settings& settings) {
    void* memory = mmap(nullptr, settings.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, settings.ring, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("cannot map the ring");
    FrameRing ring(static_cast<unsigned char*>(memory), settings.ring_bytes, true);
    Copies copies(settings.dma, memory, settings.ring_bytes);
    const std::uint16_t port = begin_port(settings);
    std::uint64_t frames = 0;
    std::uint64_t bytes = 0;
    auto reported = std::chrono::steady_clock::now();
    auto came = reported;
    report(port, 0, 0, copies.counters());
    while (stopped == 0) {
        bool any = false;
        for (std::uint16_t queue = 0; queue < settings.queues; ++queue) {
            rte_mbuf* found[burst];
            const std::uint16_t count = rte_eth_rx_burst(port, queue, found, burst);
            if (count == 0) continue;
            any = true;
            const std::uint64_t time_ns = now_ns();
            for (std::uint16_t i = 0; i < count; ++i) {
                bytes += found[i]->pkt_len;
                take(&ring, &copies, found[i], time_ns);
            }
            copies.finish();
            ring.publish();
            rte_pktmbuf_free_bulk(found, count);
            frames += count;
        }
        const auto now = std::chrono::steady_clock::now();
        if (any) came = now;
        if (now - reported >= report_every) {
            reported = now;
            report(port, frames, bytes, copies.counters());
        }
        if (settings.idle_ms != 0 && now - came >= std::chrono::milliseconds(settings.idle_ms)) break;
        if (!any) std::this_thread::sleep_for(pause_for);
    }
    report(port, frames, bytes, copies.counters());
    rte_eth_dev_stop(port);
    rte_eth_dev_close(port);
}

}  // namespace
}  // namespace lastgood

int main(int count, char** words) {
    std::signal(SIGTERM, lastgood::on_signal);
    std::signal(SIGINT, lastgood::on_signal);
    const int used = rte_eal_init(count, words);
    if (used < 0) {
        std::fprintf(stderr, "lastgood-mirror-dpdk: DPDK does not start: %s\n", rte_strerror(rte_errno));
        return 1;
    }
    int status = 0;
    try {
        lastgood::run(lastgood::parse(count - used, words + used));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "lastgood-mirror-dpdk: %s\n", error.what());
        status = 1;
    }
    rte_eal_cleanup();
    return status;
}

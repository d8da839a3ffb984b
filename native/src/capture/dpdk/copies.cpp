#include "capture/dpdk/copies.hpp"

#include <rte_dmadev.h>
#include <rte_memory.h>

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

namespace lastgood {
namespace {

constexpr std::uint16_t channel = 0;
constexpr std::uint16_t descriptors = 1024;
constexpr std::uint32_t least_dma_bytes = 256;  // below, handing over costs more than copying
constexpr auto patience = std::chrono::seconds(2);

bool start(std::int16_t id) {
    rte_dma_info info = {};
    if (rte_dma_info_get(id, &info) != 0 || (info.dev_capa & RTE_DMA_CAPA_MEM_TO_MEM) == 0) return false;
    rte_dma_conf configuration = {};
    configuration.nb_vchans = 1;
    rte_dma_vchan_conf queue = {};
    queue.direction = RTE_DMA_DIR_MEM_TO_MEM;
    queue.nb_desc = descriptors > info.max_desc ? info.max_desc : descriptors;
    return rte_dma_configure(id, &configuration) == 0 && rte_dma_vchan_setup(id, channel, &queue) == 0 &&
           rte_dma_start(id) == 0;
}

}  // namespace

Copies::Copies(unsigned engines, void* ring, std::size_t ring_bytes) {
    for (std::int16_t id = rte_dma_next_dev(0); id >= 0 && engines_.size() < engines; id = rte_dma_next_dev(id + 1)) {
        if (start(id)) engines_.push_back({id, {}, false});
    }
    if (engines_.size() < engines) {
        throw std::runtime_error("there are " + std::to_string(engines_.size()) + " DMA engines that can be used, not " +
                                 std::to_string(engines));
    }
    // Devices behind an IOMMU must be told of memory that DPDK has not allocated; others do not mind.
    if (engines > 0) rte_extmem_register(ring, ring_bytes / 4096 * 4096, nullptr, 0, 4096);
}

Copies::~Copies() {
    for (const Engine& engine : engines_) {
        rte_dma_stop(engine.id);
        rte_dma_close(engine.id);
    }
}

void Copies::copy(void* target, const void* source, std::uint64_t source_iova, std::uint32_t nbytes) {
    if (nbytes >= least_dma_bytes && !engines_.empty()) {
        Engine& engine = engines_[next_++ % engines_.size()];
        const auto target_iova = static_cast<rte_iova_t>(reinterpret_cast<std::uintptr_t>(target));
        if (!engine.lost && rte_dma_copy(engine.id, channel, source_iova, target_iova, nbytes, 0) >= 0) {
            engine.jobs.push_back({target, source, nbytes});
            return;
        }
        if (!engine.lost) ++counters_.queue_full;
    }
    std::memcpy(target, source, nbytes);
    ++counters_.by_cpu;
}

void Copies::finish() {
    for (Engine& engine : engines_) {
        if (engine.jobs.empty()) continue;
        std::size_t done = 0;
        const auto deadline = std::chrono::steady_clock::now() + patience;
        bool good = rte_dma_submit(engine.id, channel) == 0;
        while (good && done < engine.jobs.size()) {
            std::uint16_t last = 0;
            bool error = false;
            const auto left = static_cast<std::uint16_t>(engine.jobs.size() - done);
            done += rte_dma_completed(engine.id, channel, left, &last, &error);
            good = !error && std::chrono::steady_clock::now() < deadline;
        }
        counters_.by_dma += done;
        if (done < engine.jobs.size()) {
            // What it may still write are the same bytes at the same places, but for how long nobody knows: so it is
            // stopped before anything else is done with its buffers.
            engine.lost = true;
            rte_dma_stop(engine.id);
            for (; done < engine.jobs.size(); ++done) {
                const Job& job = engine.jobs[done];
                std::memcpy(job.target, job.source, job.nbytes);
                ++counters_.dma_errors;
                ++counters_.by_cpu;
            }
        }
        engine.jobs.clear();
    }
}

}  // namespace lastgood

#include "optim/steps.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace lastgood {
namespace {

using Named = std::pair<const char*, InstructionSet>;

std::vector<Named> detect() {
    std::vector<Named> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.emplace_back("avx512", InstructionSet::avx512);
    if (fma) found.emplace_back("avx2", InstructionSet::avx2);
#endif
    found.emplace_back("portable", InstructionSet::portable);
    return found;
}

const std::vector<Named>& known() {
    static const std::vector<Named> found = detect();
    return found;
}

}  // namespace

std::vector<std::string> step_variants() {
    std::vector<std::string> names;
    for (const Named& one : known()) names.emplace_back(one.first);
    return names;
}

InstructionSet step_variant(const std::string& name) {
    std::string names;
    for (const auto& [own, set] : known()) {
        if (name.empty() || name == own) return set;
        names += names.empty() ? "" : ", ";
        names += own;
    }
    throw std::invalid_argument("no variant '" + name + "' of the optimizers on this CPU; there are: " + names);
}

void in_pieces(const std::vector<std::uint64_t>& counts, unsigned threads,
               const std::function<void(std::size_t, std::uint64_t, std::uint64_t)>& work) {
    struct Piece {
        std::size_t tensor;
        std::uint64_t begin;
        std::uint64_t end;
    };
    std::vector<Piece> pieces;
    for (std::size_t tensor = 0; tensor < counts.size(); ++tensor)
        for (std::uint64_t begin = 0; begin < counts[tensor]; begin += kPieceElements)
            pieces.push_back({tensor, begin, std::min(counts[tensor], begin + kPieceElements)});
    std::atomic<std::size_t> next{0};
    const auto take = [&] {
        for (std::size_t index = next++; index < pieces.size(); index = next++)
            work(pieces[index].tensor, pieces[index].begin, pieces[index].end);
    };
    std::vector<std::thread> helpers;
    const std::size_t wanted = std::min<std::size_t>(std::max(threads, 1u), pieces.size());
    // A machine that gives no more threads still makes the step.
    try {
        while (helpers.size() + 1 < wanted) helpers.emplace_back(take);
    } catch (const std::system_error&) {
    }
    take();
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace lastgood

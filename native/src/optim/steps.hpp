// What the native optimizer steps share: the instruction sets that each is compiled for, and tensors in pieces on threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lastgood {

enum class InstructionSet { portable, avx2, avx512 };

// Names of the instruction sets that this CPU can run, fastest first; the last one is "portable".
std::vector<std::string> step_variants();

// The one of that name; "" is the fastest. Throws std::invalid_argument for one that this CPU cannot run.
InstructionSet step_variant(const std::string& name);

// A multiple of everything that must not be cut: lanes of CUDA threads, blocks, cache lines.
constexpr std::uint64_t kPieceElements = 1 << 16;

// Calls work(tensor, begin, end) for pieces of tensors of `counts` elements, on `threads` threads (the calling one among
// them). `begin` is a multiple of kPieceElements. `work` must not throw.
void in_pieces(const std::vector<std::uint64_t>& counts, unsigned threads,
               const std::function<void(std::size_t, std::uint64_t, std::uint64_t)>& work);

}  // namespace lastgood

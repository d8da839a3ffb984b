// Which bytes of one bucket at one iteration are held, and which are reserved by a record that is on its way.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace lastgood {

class Coverage {
  public:
    // `most_ranges` is how many separate ranges it remembers at most; memory for them is taken here and never again.
    Coverage(std::uint64_t nbytes, std::size_t most_ranges);

    enum class Answer { reserved, duplicate, overlapping, full };

    // Takes [begin, end), not empty and inside the bucket, for one record. `duplicate`: all of it is held already;
    // `overlapping`: some of it is held or reserved; `full`: there are too many separate ranges.
    Answer reserve(std::uint64_t begin, std::uint64_t end);
    // The record that reserved the range from `begin` on has arrived whole, or will not.
    void hold(std::uint64_t begin);
    void release(std::uint64_t begin);

    void clear();
    bool complete() const { return held_bytes_ == nbytes_; }
    std::uint64_t held_bytes() const { return held_bytes_; }
    // Ranges that are not held, in order; reserved ones are among them.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> missing() const;

  private:
    struct Interval {
        std::uint64_t begin;
        std::uint64_t end;
        bool held;
    };

    std::vector<Interval>::iterator find(std::uint64_t begin);

    std::uint64_t nbytes_;
    std::size_t most_ranges_;
    std::uint64_t held_bytes_ = 0;
    std::vector<Interval> intervals_;  // in order, disjoint; held neighbours that touch are one
};

}  // namespace lastgood

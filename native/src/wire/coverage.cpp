#include "wire/coverage.hpp"

#include <algorithm>
#include <stdexcept>

namespace lastgood {

Coverage::Coverage(std::uint64_t nbytes, std::size_t most_ranges) : nbytes_(nbytes), most_ranges_(most_ranges) {
    intervals_.reserve(most_ranges);
}

Coverage::Answer Coverage::reserve(std::uint64_t begin, std::uint64_t end) {
    // The first interval that ends behind `begin` is the first that could share a byte.
    const auto at =
        std::upper_bound(intervals_.begin(), intervals_.end(), begin,
                         [](std::uint64_t place, const Interval& interval) { return place < interval.end; });
    if (at != intervals_.end() && at->begin < end)
        return at->held && at->begin <= begin && end <= at->end ? Answer::duplicate : Answer::overlapping;
    if (intervals_.size() == most_ranges_) return Answer::full;
    intervals_.insert(at, Interval{begin, end, false});
    return Answer::reserved;
}

void Coverage::hold(std::uint64_t begin) {
    const auto at = find(begin);
    const std::uint64_t end = at->end;
    at->held = true;
    held_bytes_ += end - begin;
    const auto next = at + 1;
    if (next != intervals_.end() && next->held && next->begin == end) {
        at->end = next->end;
        intervals_.erase(next);
    }
    if (at != intervals_.begin()) {
        const auto before = at - 1;
        if (before->held && before->end == begin) {
            before->end = at->end;
            intervals_.erase(at);
        }
    }
}

void Coverage::release(std::uint64_t begin) { intervals_.erase(find(begin)); }

void Coverage::clear() {
    intervals_.clear();
    held_bytes_ = 0;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Coverage::missing() const {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
    std::uint64_t at = 0;
    for (const Interval& interval : intervals_) {
        if (!interval.held) continue;
        if (at < interval.begin) ranges.emplace_back(at, interval.begin);
        at = interval.end;
    }
    if (at < nbytes_) ranges.emplace_back(at, nbytes_);
    return ranges;
}

std::vector<Coverage::Interval>::iterator Coverage::find(std::uint64_t begin) {
    const auto at =
        std::lower_bound(intervals_.begin(), intervals_.end(), begin,
                         [](const Interval& interval, std::uint64_t place) { return interval.begin < place; });
    if (at == intervals_.end() || at->begin != begin || at->held)
        throw std::logic_error("Coverage: a range that nobody has reserved");
    return at;
}

}  // namespace lastgood

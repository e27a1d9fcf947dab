#include "runtime/large_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>

namespace vlora::runtime {
namespace {

constexpr size_t kPage = 2 << 20, kRegion = 16 << 20, kLine = 64;
// A region is taken at once and filled by and by: only pages that are written take memory.

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Regions, each with its free pieces by address; first fit, neighbours joined.
class Regions {
 public:
  char* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(change_);
    for (auto& [base, region] : regions_)
      for (auto& [at, size] : region.free)
        if (size >= bytes) return cut(region, at, bytes);
    const size_t size = rounded(std::max(bytes, kRegion), kPage);
    // A page more, so that the region can begin on one.
    void* const all = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    char* const base = reinterpret_cast<char*>(rounded(reinterpret_cast<size_t>(all), kPage));
    madvise(base, size, MADV_HUGEPAGE);  // refused: ordinary pages
    Region& region = regions_[base];
    region = {all, size, {}};
    region.free[base] = size;
    return cut(region, base, bytes);
  }

  void give(char* at, size_t bytes) {
    std::lock_guard<std::mutex> lock(change_);
    const auto found = std::prev(regions_.upper_bound(at));
    Region& region = found->second;
    used_ -= bytes;
    const auto after = region.free.lower_bound(at);
    if (after != region.free.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == at) {
        at = before->first;
        bytes += before->second;
        region.free.erase(before);
      }
    }
    if (after != region.free.end() && at + bytes == after->first) {
      bytes += after->second;
      region.free.erase(after);
    }
    if (bytes == region.size) {
      munmap(region.mapped, region.size + kPage);
      regions_.erase(found);
    } else {
      region.free[at] = bytes;
    }
  }

  LargePages now() {
    std::lock_guard<std::mutex> lock(change_);
    LargePages found{0, used_};
    for (const auto& [base, region] : regions_) found.regions += region.size;
    return found;
  }

 private:
  struct Region {
    void* mapped;
    size_t size;
    std::map<char*, size_t> free;
  };

  char* cut(Region& region, char* at, size_t bytes) {
    const auto piece = region.free.find(at);
    const size_t size = piece->second;
    region.free.erase(piece);
    if (size > bytes) region.free[at + bytes] = size - bytes;
    used_ += bytes;
    return at;
  }

  std::mutex change_;
  std::map<char*, Region> regions_;
  size_t used_ = 0;
};

Regions& regions() {
  static Regions* const all = new Regions;  // outlives whatever still holds a piece at exit
  return *all;
}

}  // namespace

std::shared_ptr<char> in_large_pages(size_t bytes) {
  const size_t size = rounded(std::max<size_t>(1, bytes), kLine);
  return {regions().take(size), [size](char* at) { regions().give(at, size); }};
}

LargePages large_pages() { return regions().now(); }

}  // namespace vlora::runtime

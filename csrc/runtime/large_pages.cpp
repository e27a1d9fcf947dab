#include "runtime/large_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>

namespace vlora::runtime {
namespace {

constexpr size_t kPage = 2 << 20, kLine = 64;
// Bytes that are mapped at a time. Only pages that are written take physical memory.
constexpr size_t kRegion = 16 << 20;

size_t round_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Regions, each with its free ranges by address. Allocation is first fit. Adjacent free ranges are
// joined.
class Regions {
 public:
  char* allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [base, region] : regions_)
      for (auto& [address, size] : region.free)
        if (size >= bytes) return take(region, address, bytes);
    const size_t size = round_up(std::max(bytes, kRegion), kPage);
    // One page more is mapped, so that the region can begin on a page boundary.
    void* const mapped =
        mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    char* const base = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(mapped), kPage));
    madvise(base, size, MADV_HUGEPAGE);  // if this fails, the pages are ordinary ones
    Region& region = regions_[base];
    region = {mapped, size, {}};
    region.free[base] = size;
    return take(region, base, bytes);
  }

  void release(char* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto owner = std::prev(regions_.upper_bound(address));
    Region& region = owner->second;
    used_ -= bytes;
    const auto after = region.free.lower_bound(address);
    if (after != region.free.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == address) {
        address = before->first;
        bytes += before->second;
        region.free.erase(before);
      }
    }
    if (after != region.free.end() && address + bytes == after->first) {
      bytes += after->second;
      region.free.erase(after);
    }
    if (bytes == region.size) {
      munmap(region.mapped, region.size + kPage);
      regions_.erase(owner);
    } else {
      region.free[address] = bytes;
    }
  }

  LargePages sizes() {
    std::lock_guard<std::mutex> lock(mutex_);
    LargePages sizes{0, used_};
    for (const auto& [base, region] : regions_) sizes.regions += region.size;
    return sizes;
  }

 private:
  struct Region {
    void* mapped;
    size_t size;
    std::map<char*, size_t> free;
  };

  // Takes `bytes` from the start of a free range.
  char* take(Region& region, char* address, size_t bytes) {
    const auto range = region.free.find(address);
    const size_t size = range->second;
    region.free.erase(range);
    if (size > bytes) region.free[address + bytes] = size - bytes;
    used_ += bytes;
    return address;
  }

  std::mutex mutex_;
  std::map<char*, Region> regions_;
  size_t used_ = 0;
};

Regions& regions() {
  static Regions* const all =
      new Regions;  // never deleted: allocations may be released during exit
  return *all;
}

}  // namespace

std::shared_ptr<char> in_large_pages(size_t bytes) {
  const size_t size = round_up(std::max<size_t>(1, bytes), kLine);
  return {regions().allocate(size), [size](char* address) { regions().release(address, size); }};
}

LargePages large_pages() { return regions().sizes(); }

}  // namespace vlora::runtime

// Memory in large pages, for data that is read from end to end. In a virtual machine a core reads
// pages of 2 MiB twice as fast as pages of 4 KiB, since it walks fewer page tables.
#pragma once

#include <cstddef>
#include <memory>

namespace vlora::runtime {

// Allocates at least `bytes`, aligned to a cache line, in a region for which the system is asked
// for large pages. If the system refuses, the pages are ordinary ones. Allocations of several
// owners share a region, which is unmapped when the last of them is released. Any thread may call
// this function. Throws std::bad_alloc.
std::shared_ptr<char> in_large_pages(size_t bytes);

// Bytes of all regions, and of the allocations in them; used by tests.
struct LargePages {
  size_t regions, allocated;
};
LargePages large_pages();

}  // namespace vlora::runtime

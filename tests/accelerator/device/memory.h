// Memory of the device by streams, and pinned memory of the host.

#pragma once

#include "queues.h"

namespace {

struct Block {
  void* memory;
  size_t nbytes;     // of the memory
  size_t requested;  // of the tensor
  int64_t stream;
  std::set<int64_t> used_on;  // other streams, see record_stream
  std::vector<std::shared_ptr<EventState>> pending;
};

void poison(const Block& block) {
  Scheduler::get().enqueue(block.stream, [memory = block.memory, nbytes = block.nbytes] {
    std::memset(memory, POISON, nbytes);
  }, "", 0);  // not the program's
}

// Memory by streams: what a stream has freed goes to its next allocation at once, for work on it is in order.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &Allocator::release, device()};
    Scheduler::get().may_block();
    contexts.touch(current_device);
    std::lock_guard lock(mutex_);
    reclaim();
    size_t rounded = (nbytes + 511) / 512 * 512;
    Block* block = nullptr;
    auto& pool = pools_[current_stream()];
    for (auto it = pool.rbegin(); it != pool.rend(); ++it) {  // the last that was freed first
      if ((*it)->nbytes == rounded) {
        block = *it;
        pool.erase(std::next(it).base());
        if (!poison_when_freed) poison(*block);
        break;
      }
    }
    if (block == nullptr) {
      void* memory = nullptr;
      TORCH_CHECK(posix_memalign(&memory, 512, rounded) == 0, "no memory for ", rounded, " bytes");
      std::memset(memory, POISON, rounded);
      block = new Block{memory, rounded, 0, current_stream(), {}, {}};
      reserved_ += rounded;
      peak_reserved_ = std::max(peak_reserved_, reserved_);
    }
    block->requested = nbytes;
    requested_ += nbytes;
    journal.add("alloc", block->stream, std::to_string(reinterpret_cast<uintptr_t>(block)), "", static_cast<int64_t>(nbytes));
    allocated_ += rounded;
    peak_ = std::max(peak_, allocated_);
    ++allocations;
    in_use_[block->memory] = block;
    return {block->memory, block, &Allocator::release, device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    Scheduler::get().enqueue(current_stream(), [=] { std::memcpy(target, source, nbytes); }, "memcpy");
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Scheduler::get().synchronize_all();
    std::lock_guard lock(mutex_);
    reclaim();
    for (auto& [stream, pool] : pools_) {
      for (Block* block : pool) {
        reserved_ -= block->nbytes;
        std::free(block->memory);
        delete block;
      }
      pool.clear();
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard lock(mutex_);
    if (block != nullptr && stream.id() != block->stream) block->used_on.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& stat, size_t current, size_t peak) {
      auto& all = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = static_cast<int64_t>(current);
      all.peak = static_cast<int64_t>(peak);
    };
    set(stats.allocated_bytes, allocated_, peak_);
    set(stats.active_bytes, allocated_, peak_);
    set(stats.requested_bytes, requested_, requested_);
    set(stats.reserved_bytes, reserved_, peak_reserved_);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    peak_ = allocated_;
    peak_reserved_ = reserved_;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    constexpr size_t total = size_t(16) << 30;
    return {total - std::min(total, reserved_), total};
  }

  static Allocator& get() {
    static auto* made = new Allocator;
    return *made;
  }

  std::atomic<int64_t> allocations{0};

  // By default memory becomes NaN when its stream uses it again, as on a GPU, where it may keep its values until then.
  // With this it does when it is freed: a program that frees memory of one stream before another has read it shows
  // even if a later wait would have saved it.
  std::atomic<bool> poison_when_freed{false};

 private:
  static void release(void* context) {
    if (context != nullptr) get().free_block(static_cast<Block*>(context));
  }

  void free_block(Block* block) {
    std::lock_guard lock(mutex_);
    in_use_.erase(block->memory);
    allocated_ -= block->nbytes;
    requested_ -= block->requested;
    journal.add("free", block->stream, std::to_string(reinterpret_cast<uintptr_t>(block)), "", static_cast<int64_t>(block->requested));
    for (int64_t stream : block->used_on) {
      block->pending.push_back(std::make_shared<EventState>());
      Scheduler::get().record(stream, block->pending.back(), false);
    }
    block->used_on.clear();
    if (!block->pending.empty()) {
      pending_.push_back(block);
      return;
    }
    if (poison_when_freed) poison(*block);
    pools_[block->stream].push_back(block);
  }

  // Blocks that other streams have used come back when these streams are through.
  void reclaim() {
    for (auto it = pending_.begin(); it != pending_.end();) {
      Block* block = *it;
      auto& events = block->pending;
      if (!std::all_of(events.begin(), events.end(), [](const auto& e) { return Scheduler::get().reached(e); })) {
        ++it;
        continue;
      }
      events.clear();
      if (poison_when_freed) poison(*block);
      pools_[block->stream].push_back(block);
      it = pending_.erase(it);
    }
  }

  std::mutex mutex_;
  std::map<int64_t, std::vector<Block*>> pools_;
  std::vector<Block*> pending_;
  std::unordered_map<void*, Block*> in_use_;
  size_t requested_ = 0, allocated_ = 0, peak_ = 0, reserved_ = 0, peak_reserved_ = 0;
};

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const {
  Allocator::get().recordStream(data, on);
}

// Pinned host memory. It is freed when the copies that use it are complete.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 4096, nbytes) == 0, "no memory for ", nbytes, " bytes");
    std::lock_guard lock(mutex_);
    reclaim();
    blocks_[memory] = Host{nbytes, {}, false};
    return {memory, memory, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }

  bool owns(const void* pointer) {
    std::lock_guard lock(mutex_);
    return find(pointer) != blocks_.end();
  }

  // A copy on a stream uses this memory.
  void use(const void* pointer, int64_t stream) {
    std::lock_guard lock(mutex_);
    auto it = find(pointer);
    if (it == blocks_.end()) return;
    it->second.uses.push_back(std::make_shared<EventState>());
    Scheduler::get().record(stream, it->second.uses.back(), false);
  }

  static PinnedAllocator& get() {
    static auto* made = new PinnedAllocator;
    return *made;
  }

 private:
  struct Host {
    size_t nbytes;
    std::vector<std::shared_ptr<EventState>> uses;
    bool freed;
  };

  static void release(void* memory) {
    auto& self = get();
    std::lock_guard lock(self.mutex_);
    auto it = self.blocks_.find(memory);
    if (it == self.blocks_.end()) return;
    it->second.freed = true;
    self.reclaim();
  }

  std::map<void*, Host>::iterator find(const void* pointer) {
    auto it = blocks_.upper_bound(const_cast<void*>(pointer));
    if (it == blocks_.begin()) return blocks_.end();
    --it;
    bool inside = static_cast<const char*>(pointer) < static_cast<char*>(it->first) + it->second.nbytes;
    return inside && !it->second.freed ? it : blocks_.end();
  }

  void reclaim() {
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      auto& uses = it->second.uses;
      uses.erase(
          std::remove_if(uses.begin(), uses.end(), [](const auto& e) { return Scheduler::get().reached(e); }),
          uses.end());
      if (it->second.freed && uses.empty()) {
        std::free(it->first);
        it = blocks_.erase(it);
      } else {
        ++it;
      }
    }
  }

  std::mutex mutex_;
  std::map<void*, Host> blocks_;
};

}  // namespace

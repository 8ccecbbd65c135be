// A simulated accelerator for tests, as a PrivateUse1 device of torch.
//
// Kernels are queued on streams and run later, by one worker thread, on the host. The worker chooses among the streams
// by a policy, so that a program with a missing wait computes wrong values. Memory is filled with NaN on the stream that
// owns it before that uses it again, so that memory that is freed or used too early shows, too. Queued kernels hold
// pointers, sizes and dtypes, never tensors: they keep no memory alive.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xFF;  // NaN in every floating-point type

c10::Device device() { return c10::Device(DEVICE, 0); }

// ---------------------------------------------------------------------------------------------------------------------
// Queues

// An event: how often it was recorded, how many of these the worker has come to, and when it came to the last.
struct EventState {
  int64_t recorded = 0;
  int64_t reached = 0;
  Clock::time_point at{};
};

struct Task {
  enum Kind { RUN, RECORD, WAIT, POLL } kind = RUN;
  std::function<void()> run;
  std::function<bool()> poll;  // whether it is complete
  std::shared_ptr<EventState> event;
  int64_t version = 0;
};

struct Queue {
  std::deque<Task> tasks;
  bool starved = false;
  Clock::time_point stalled_until{};
};

class Scheduler {
 public:
  static Scheduler& get() {
    static auto* made = new Scheduler;  // outlives all static objects; `stop` ends its thread
    return *made;
  }

  int64_t new_stream() {
    std::lock_guard lock(mutex_);
    queues_.push_back(std::make_unique<Queue>());
    return static_cast<int64_t>(queues_.size()) - 1;
  }

  void enqueue(int64_t stream, std::function<void()> run) {
    push(stream, {Task::RUN, std::move(run), nullptr, nullptr, 0});
    ++launches;
  }

  void enqueue_poll(int64_t stream, std::function<bool()> poll) {
    push(stream, {Task::POLL, nullptr, std::move(poll), nullptr, 0});
  }

  void record(int64_t stream, const std::shared_ptr<EventState>& event) {
    std::unique_lock lock(mutex_);
    push_locked(stream, {Task::RECORD, nullptr, nullptr, event, ++event->recorded});
  }

  void wait(int64_t stream, const std::shared_ptr<EventState>& event) {
    std::unique_lock lock(mutex_);
    if (event->reached < event->recorded) push_locked(stream, {Task::WAIT, nullptr, nullptr, event, event->recorded});
  }

  // Milliseconds between two events that the worker has come to.
  double between(const std::shared_ptr<EventState>& first, const std::shared_ptr<EventState>& second) {
    std::lock_guard lock(mutex_);
    for (const auto& event : {first, second}) {
      TORCH_CHECK(event->recorded > 0 && event->reached >= event->recorded, "an event is timed that is not complete");
    }
    return std::chrono::duration<double, std::milli>(second->at - first->at).count();
  }

  bool reached(const std::shared_ptr<EventState>& event) {
    std::lock_guard lock(mutex_);
    return event->reached >= event->recorded;
  }

  bool empty(int64_t stream) {
    std::lock_guard lock(mutex_);
    return queues_.at(stream)->tasks.empty();
  }

  // The host waits. Raises the error of a kernel that has failed since the last time.
  void synchronize(const std::shared_ptr<EventState>& event) {
    block([&, version = event->recorded] { return event->reached >= version; });
  }

  void synchronize_stream(int64_t stream) {
    auto event = std::make_shared<EventState>();
    record(stream, event);
    synchronize(event);
  }

  void synchronize_all() {
    block([&] {
      return std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue->tasks.empty(); });
    });
  }

  // Streams that the worker leaves alone as long as it can; and a seed for the order of all others, or none.
  void set_policy(const std::vector<int64_t>& starved, std::optional<uint64_t> seed, double patience_s) {
    std::lock_guard lock(mutex_);
    for (auto& queue : queues_) queue->starved = false;
    for (auto stream : starved) queues_.at(stream)->starved = true;
    random_ = seed ? std::optional<std::mt19937_64>(*seed) : std::nullopt;
    patience_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience_s));
    work_.notify_all();
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
      work_.notify_all();
    }
    if (worker_.joinable()) worker_.join();
  }

  std::atomic<int64_t> launches{0};

 private:
  Scheduler() {
    queues_.push_back(std::make_unique<Queue>());  // the default stream
    worker_ = std::thread([this] { work(); });
  }

  void push(int64_t stream, Task task) {
    std::lock_guard lock(mutex_);
    push_locked(stream, std::move(task));
  }

  void push_locked(int64_t stream, Task task) {
    queues_.at(stream)->tasks.push_back(std::move(task));
    active_ = Clock::now();
    work_.notify_all();
  }

  template <class Condition>
  void block(Condition is_over) {
    std::optional<pybind11::gil_scoped_release> without_gil;  // the worker may need it
    if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
    std::unique_lock lock(mutex_);
    if (!is_over()) {
      ++hosts_waiting_;
      work_.notify_all();
      done_.wait(lock, [&] { return is_over() || stopped_; });
      --hosts_waiting_;
    }
    if (!error_.empty()) {
      std::string error;
      error.swap(error_);
      lock.unlock();
      TORCH_CHECK(false, "a kernel of the simulated accelerator has failed: ", error);
    }
  }

  // The queue whose first task is next, or none. `again`: when to look again at the latest.
  Queue* choose(Clock::time_point now, Clock::time_point& again, bool& out_of_patience) {
    std::vector<Queue*> ready, starved;
    for (auto& queue : queues_) {
      if (queue->tasks.empty()) continue;
      const Task& task = queue->tasks.front();
      if (task.kind == Task::WAIT && task.event->reached < task.version) continue;
      if (task.kind == Task::POLL && queue->stalled_until > now) {
        again = std::min(again, queue->stalled_until);
        continue;
      }
      (queue->starved ? starved : ready).push_back(queue.get());
    }
    if (ready.empty() && !starved.empty()) {
      out_of_patience = hosts_waiting_ == 0 && now - active_ >= patience_;
      if (hosts_waiting_ > 0 || out_of_patience) {
        ready = starved;
      } else {
        again = std::min(again, active_ + patience_);
      }
    }
    if (ready.empty()) return nullptr;
    return ready[random_ ? (*random_)() % ready.size() : 0];
  }

  void work() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      auto now = Clock::now(), again = now + std::chrono::seconds(1);
      bool out_of_patience = false;
      Queue* queue = choose(now, again, out_of_patience);
      if (queue == nullptr) {
        work_.wait_until(lock, again);
        continue;
      }
      Task task = std::move(queue->tasks.front());
      bool complete = true;
      if (task.kind == Task::RECORD) {
        task.event->reached = std::max(task.event->reached, task.version);
        task.event->at = Clock::now();
      } else if (task.kind != Task::WAIT) {
        lock.unlock();
        std::string error;
        try {
          if (task.kind == Task::RUN) task.run();
          else complete = task.poll();
        } catch (const std::exception& failure) {
          error = failure.what();
        }
        lock.lock();
        if (!error.empty() && error_.empty()) error_ = error;
      }
      if (complete) {
        queue->tasks.pop_front();
        if (task.kind != Task::WAIT && !out_of_patience) active_ = Clock::now();
        done_.notify_all();
        lock.unlock();
        task = {};  // it may hold the last reference to an object of Python, whose lock the host may have
        lock.lock();
      } else {
        queue->tasks.front() = std::move(task);
        queue->stalled_until = Clock::now() + std::chrono::microseconds(100);
      }
    }
    done_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::optional<std::mt19937_64> random_;
  Clock::duration patience_ = std::chrono::milliseconds(500);
  Clock::time_point active_ = Clock::now();
  int hosts_waiting_ = 0;
  std::string error_;
  bool stopped_ = false;
  std::thread worker_;
};

thread_local int64_t current_stream = 0;

// How often the host has waited for the device, by cause.
class Waits {
 public:
  void count(const std::string& cause) {
    std::lock_guard lock(mutex_);
    ++counts_[cause];
  }
  std::map<std::string, int64_t> counts() {
    std::lock_guard lock(mutex_);
    return counts_;
  }
  void reset() {
    std::lock_guard lock(mutex_);
    counts_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};

Waits waits;

void wait_for_current_stream(const std::string& cause) {
  waits.count(cause);
  Scheduler::get().synchronize_stream(current_stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events, as torch's generic code sees them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(Scheduler::get().new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(Scheduler::get().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto before = stream(current_stream);
    current_stream = other.id();
    return before;
  }
  bool queryStream(const c10::Stream& of) const override { return Scheduler::get().empty(of.id()); }
  void synchronizeStream(const c10::Stream& of) const override {
    waits.count("stream");
    Scheduler::get().synchronize_stream(of.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    waits.count("device");
    Scheduler::get().synchronize_all();
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::shared_ptr<EventState>(std::make_shared<EventState>());
    Scheduler::get().record(on.id(), state(*event));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event != nullptr) Scheduler::get().wait(on.id(), state(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || Scheduler::get().reached(state(event)); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    waits.count("event");
    Scheduler::get().synchronize(state(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<EventState>*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "an event is timed that was not recorded");
    return Scheduler::get().between(state(first), state(second));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override;

 private:
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  static std::shared_ptr<EventState>& state(void* event) { return *static_cast<std::shared_ptr<EventState>*>(event); }
};

// ---------------------------------------------------------------------------------------------------------------------
// Memory

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
  });
  --Scheduler::get().launches;  // not the program's
}

// Memory by streams: what a stream has freed goes to its next allocation at once, for work on it is in order.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &Allocator::release, device()};
    std::lock_guard lock(mutex_);
    reclaim();
    size_t rounded = (nbytes + 511) / 512 * 512;
    Block* block = nullptr;
    auto& pool = pools_[current_stream];
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
      block = new Block{memory, rounded, 0, current_stream, {}, {}};
      reserved_ += rounded;
      peak_reserved_ = std::max(peak_reserved_, reserved_);
    }
    block->requested = nbytes;
    allocated_ += rounded;
    peak_ = std::max(peak_, allocated_);
    ++allocations;
    in_use_[block->memory] = block;
    return {block->memory, block, &Allocator::release, device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    Scheduler::get().enqueue(current_stream, [=] { std::memcpy(target, source, nbytes); });
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
    for (int64_t stream : block->used_on) {
      block->pending.push_back(std::make_shared<EventState>());
      Scheduler::get().record(stream, block->pending.back());
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
  size_t allocated_ = 0, peak_ = 0, reserved_ = 0, peak_reserved_ = 0;
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
    Scheduler::get().record(stream, it->second.uses.back());
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

// ---------------------------------------------------------------------------------------------------------------------
// Random numbers: each kernel draws from a generator of its own, seeded when it is queued

class Generator final : public c10::GeneratorImpl {
 public:
  Generator() : c10::GeneratorImpl(device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return seed_;
  }
  uint64_t next() { return (seed_ * 0x9E3779B97F4A7C15ull) ^ (++offset_ * 0xBF58476D1CE4E5B9ull); }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_VALUE(state.numel() == 16, "the state of a generator of the simulated accelerator has 16 bytes");
    auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0], offset_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* values = static_cast<uint64_t*>(state.mutable_data_ptr());
    values[0] = seed_, values[1] = offset_;
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator;
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }

  uint64_t seed_ = 0, offset_ = 0;
};

const at::Generator& default_generator() {
  static auto* made = new at::Generator(at::make_generator<Generator>());
  return *made;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

// A tensor on the device as a queued kernel knows it.
struct View {
  void* memory;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;

  explicit View(const at::Tensor& tensor)
      : memory(tensor.numel() ? tensor.mutable_data_ptr() : nullptr),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}

  at::Tensor on_host() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    if (memory == nullptr) return at::empty_strided(sizes, strides, options);
    return at::from_blob(memory, sizes, strides, [](void*) {}, options);
  }
};

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE; }

// The values of an operator's arguments with tensors replaced by `replace`.
c10::IValue replaced(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(replace(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor ? std::optional<at::Tensor>(replace(*tensor)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  replaced(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (!on_device(tensor) && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// An argument of a queued kernel: what it is made of, without tensors of the device.
using Made = std::function<c10::IValue(const at::Generator&)>;

Made without_tensors(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!on_device(tensor)) return [tensor](const at::Generator&) { return c10::IValue(tensor); };
    return [view = View(tensor)](const at::Generator&) { return c10::IValue(view.on_host()); };
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    std::vector<std::optional<Made>> parts;
    bool optional = value.isOptionalTensorList();
    if (optional) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        parts.push_back(tensor && tensor->defined() ? std::optional<Made>(without_tensors(*tensor)) : std::nullopt);
      }
    } else {
      for (const auto& tensor : value.toTensorVector()) parts.push_back(without_tensors(tensor));
    }
    return [parts, optional](const at::Generator& generator) -> c10::IValue {
      if (!optional) {
        c10::List<at::Tensor> tensors;
        for (const auto& part : parts) tensors.push_back((*part)(generator).toTensor());
        return tensors;
      }
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& part : parts) {
        tensors.push_back(part ? std::optional<at::Tensor>((*part)(generator).toTensor()) : std::nullopt);
      }
      return tensors;
    };
  }
  if (value.isGenerator()) return [](const at::Generator& generator) { return c10::IValue(generator); };
  if (value.isDevice()) return [](const at::Generator&) { return c10::IValue(c10::Device(at::kCPU)); };
  return [value](const at::Generator&) { return value; };
}

Generator* generator_of(const torch::jit::Stack& arguments) {
  for (const auto& value : arguments) {
    if (value.isGenerator() && value.toGenerator().device().type() == DEVICE) {
      return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
    }
  }
  return static_cast<Generator*>(default_generator().unsafeGetGeneratorImpl());
}

// The argument that a result is, for operators that write to their arguments.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return std::nullopt;
  TORCH_CHECK(
      alias->isWrite(), schema.name(), " returns a view, and the simulated accelerator does not have it as one");
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    const auto* own = schema.arguments()[place].alias_info();
    if (own != nullptr && own->beforeSets() == alias->beforeSets()) return place;
  }
  return std::nullopt;
}

// Tensors of the host among the arguments: numbers are copied into the kernel, others are not allowed, as on a GPU.
void check_host_tensors(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      bool index = schema.name() == "aten::index" || schema.name() == "aten::index_put_" ||
          schema.name() == "aten::_index_put_impl_";
      TORCH_CHECK(
          on_device(tensor) || tensor.dim() == 0 || index,
          "expected all tensors to be on the same device, but ",
          schema.name(),
          " got one on ",
          tensor.device(),
          " and others on ",
          device());
    });
  }
}

void resize_to(const at::Tensor& tensor, at::IntArrayRef sizes) {
  if (tensor.sizes() != sizes) tensor.resize_(sizes);
}

// Operators whose results depend on the values: the host waits for them.
void run_at_once(const c10::OperatorHandle& op, torch::jit::Stack* stack, torch::jit::Stack arguments) {
  const auto& schema = op.schema();
  wait_for_current_stream(schema.name());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto generator = at::detail::createCPUGenerator(generator_of(arguments)->next());
  torch::jit::Stack host;
  for (const auto& value : arguments) host.push_back(without_tensors(value)(generator));
  op.callBoxed(&host);
  ++Scheduler::get().launches;
  for (size_t result = 0; result < host.size(); ++result) {
    if (auto place = written_argument(schema, result)) {
      stack->push_back(arguments[*place]);
      continue;
    }
    stack->push_back(replaced(host[result], [](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device()));
      View view(copy);
      Scheduler::get().enqueue(current_stream, [view, tensor] { view.on_host().copy_(tensor); });
      return copy;
    }));
  }
}

// On a device the statistics of a layer norm are in float32 whatever its inputs are; the CPU's kernel has them in the
// dtype of the inputs, and takes no other.
void fit_to_kernel(const c10::FunctionSchema& schema, torch::jit::Stack& host) {
  if (schema.name() != "aten::native_layer_norm_backward") return;
  auto dtype = host[1].toTensor().scalar_type();
  if (host[5].isTensor() && host[5].toTensor().scalar_type() != dtype) return;
  for (size_t place : {3, 4}) host[place] = host[place].toTensor().to(dtype);
}

void queue_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), results = schema.returns().size();
  torch::jit::Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  check_host_tensors(schema, arguments);

  // The shapes of results that are new, from the kernel for tensors without values.
  bool makes_results = false, writes_out = false;
  for (size_t result = 0; result < results; ++result) makes_results |= !written_argument(schema, result);
  for (const auto& argument : schema.arguments()) writes_out |= argument.is_out();
  std::vector<c10::IValue> shapes;
  if (makes_results || writes_out) {
    torch::jit::Stack metas;
    for (const auto& value : arguments) {
      if (value.isGenerator()) metas.push_back(c10::IValue());
      else if (value.isDevice()) metas.push_back(c10::Device(at::kMeta));
      else metas.push_back(replaced(value, as_meta));
    }
    auto outs = metas;
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.callBoxed(&metas);
    } catch (const std::exception&) {
      // There is no such kernel, or it refuses what depends on values, or the arguments are wrong.
      return run_at_once(op, stack, std::move(arguments));
    }
    shapes = std::move(metas);
    for (size_t place = 0; place < count; ++place) {
      if (schema.arguments()[place].is_out() && arguments[place].isTensor()) {
        resize_to(arguments[place].toTensor(), outs[place].toTensor().sizes());
      }
    }
    for (const auto& value : shapes) {
      if (!value.isTensor() && !value.isTensorList() && !value.isNone()) {
        return run_at_once(op, stack, std::move(arguments));  // a number that depends on values
      }
    }
  }

  std::vector<c10::IValue> given;
  std::vector<std::vector<std::pair<size_t, View>>> targets(results);
  for (size_t result = 0; result < results; ++result) {
    if (auto place = written_argument(schema, result)) {
      given.push_back(arguments[*place]);
      continue;
    }
    size_t number = 0;
    given.push_back(replaced(shapes[result], [&](const at::Tensor& meta) {
      size_t own = number++;
      if (!meta.defined()) return meta;
      auto made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device()));
      targets[result].emplace_back(own, View(made));
      return made;
    }));
  }

  std::vector<Made> parts;
  for (const auto& value : arguments) parts.push_back(without_tensors(value));
  int64_t generator_place = -1;
  for (size_t place = 0; place < count; ++place) {
    if (schema.arguments()[place].name() == "generator") generator_place = static_cast<int64_t>(place);
  }
  uint64_t seed = generator_place < 0 ? 0 : generator_of(arguments)->next();
  arguments.clear();
  Scheduler::get().enqueue(current_stream, [op, parts, targets, seed, generator_place] {
    at::Generator generator;
    if (generator_place >= 0) generator = at::detail::createCPUGenerator(seed);
    torch::jit::Stack host;
    for (const auto& part : parts) host.push_back(part(generator));
    if (generator_place >= 0) host[generator_place] = generator;
    fit_to_kernel(op.schema(), host);
    op.callBoxed(&host);
    for (size_t result = 0; result < targets.size(); ++result) {
      for (const auto& [number, view] : targets[result]) {
        at::Tensor value = host[result].isTensor() ? host[result].toTensor() : host[result].toTensorVector()[number];
        view.on_host().copy_(value);
      }
    }
  });
  for (auto& value : given) stack->push_back(std::move(value));
}

at::Tensor empty(
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &Allocator::get(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes),
      C10_AS_INTARRAYREF_SLOW(strides),
      &Allocator::get(),
      keys,
      c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto* own = storage.unsafeGetStorageImpl();
  if (nbytes == own->nbytes()) return;
  auto memory = Allocator::get().allocate(nbytes);
  size_t kept = std::min(nbytes, own->nbytes());
  if (kept) Allocator::get().copy_data(memory.get(), own->data_ptr().get(), kept);
  own->set_data_ptr_noswap(std::move(memory));
  own->set_nbytes(nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t nbytes = (self.numel() + self.storage_offset()) * self.element_size();
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  if (strides.empty() && !shape.empty()) impl->set_sizes_contiguous(shape);
  else impl->set_sizes_and_strides(shape, C10_AS_INTARRAYREF_SLOW(strides));
  return self;
}

at::Tensor& set_source_storage(at::Tensor& self, c10::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {numel}, {});
}

bool unpinned_is_an_error = true;

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  TORCH_CHECK(source.sizes() == target.sizes() || at::is_expandable_to(source.sizes(), target.sizes()));
  auto expanded = source.expand_as(target);
  bool from_host = !on_device(expanded), to_host = !on_device(target);
  auto& scheduler = Scheduler::get();
  if (!from_host && !to_host) {
    scheduler.enqueue(current_stream, [from = View(expanded), to = View(target)] {
      to.on_host().copy_(from.on_host());
    });
    return target;
  }
  const at::Tensor& host = from_host ? expanded : target;
  bool pinned = PinnedAllocator::get().owns(host.data_ptr());
  TORCH_CHECK(
      !non_blocking || pinned || !unpinned_is_an_error,
      "a non_blocking copy of ",
      host.sizes(),
      from_host ? " from" : " to",
      " host memory that is not pinned");
  // As on a GPU, the device converts: the host's memory is read or written as it is.
  scheduler.enqueue(current_stream, [from = View(expanded), to = View(target)] { to.on_host().copy_(from.on_host()); });
  if (non_blocking && pinned) {
    PinnedAllocator::get().use(host.data_ptr(), current_stream);
  } else {
    wait_for_current_stream(from_host ? "copy from host" : "copy to host");
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  resize_to(target, source.sizes());
  return copy_from(source, target, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Allocator::get().recordStream(self.storage().data_ptr(), stream);
}

// Whether `tensor.data = from` is allowed. As with CUDA, data moves between the device and the host.
bool can_exchange_data(const at::Tensor& self, const at::Tensor& from) {
  auto plain = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (on_device(tensor) || tensor.device().is_cpu());
  };
  return plain(self) && plain(from);
}

// The kernel of the CPU takes no generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(at::kBool));
  double kept = train.value_or(true) ? 1 - p : 1;
  uint64_t seed = generator_of({})->next();
  Scheduler::get().enqueue(current_stream, [kept, seed, from = View(input), to = View(output), where = View(mask)] {
    auto mask = where.on_host().bernoulli_(kept, at::detail::createCPUGenerator(seed));
    to.on_host().copy_(kept == 0 ? at::zeros_like(from.on_host()) : from.on_host() * mask / kept);
  });
  return {output, mask};
}

at::Scalar local_scalar(const at::Tensor& self) {
  wait_for_current_stream("item");
  return View(self).on_host().item();
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives with the semantics of NCCL: they run on a stream, in the order in which they were called

// A group of processes. Each collective is a file of every rank in a folder that all of them see.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  using Payloads = std::vector<std::string>;

  Communicator(std::string folder, int64_t rank, int64_t size) : folder_(std::move(folder)), rank_(rank), size_(size) {}

  // Queue a collective: every rank publishes its inputs, and `finish` computes the outputs from those of all ranks.
  void call(
      const std::string& label,
      const std::vector<at::Tensor>& inputs,
      std::function<void(const Payloads&)> finish,
      const std::string& head = "") {
    std::vector<View> views;
    for (const auto& tensor : inputs) views.emplace_back(tensor);
    int64_t number = called_++;
    auto payloads = std::make_shared<Payloads>(size_);
    auto missing = std::make_shared<std::set<int64_t>>();
    for (int64_t rank = 0; rank < size_; ++rank) missing->insert(rank);
    auto self = shared_from_this();
    auto published = std::make_shared<bool>(false);
    Scheduler::get().enqueue_poll(current_stream, [=] {
      if (self->completed_ < number) return false;  // an earlier one of this group, on another stream
      if (!*published) {
        write(self->path(number, self->rank_), label + "\n" + head + bytes_of(views));
        *published = true;
      }
      for (auto it = missing->begin(); it != missing->end();) {
        it = self->read(number, *it, label, (*payloads)[*it]) ? missing->erase(it) : std::next(it);
      }
      if (!missing->empty()) return false;
      self->completed_ = number + 1;
      if (number > 0) std::remove(self->path(number - 1, self->rank_).c_str());  // all ranks have come further
      finish(*payloads);
      return true;
    });
    ++Scheduler::get().launches;
  }

  // Queue one half of a message between two ranks, each pair of which counts its messages.
  void send(const at::Tensor& tensor, int64_t peer, int64_t tag) {
    auto self = shared_from_this();
    auto path = message(rank_, peer, tag, sent_[{peer, tag}]++);
    Scheduler::get().enqueue_poll(current_stream, [self, path, view = View(tensor)] {
      write(path, bytes_of({view}));
      return true;
    });
  }
  void recv(const at::Tensor& tensor, int64_t peer, int64_t tag) {
    auto path = message(peer, rank_, tag, received_[{peer, tag}]++);
    Scheduler::get().enqueue_poll(current_stream, [path, view = View(tensor)] {
      std::string payload;
      if (!load(path, payload)) return false;
      std::remove(path.c_str());
      fill(view, payload, 0);
      return true;
    });
  }

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  static void fill(const View& view, const std::string& payload, size_t offset) {
    auto target = view.on_host();
    TORCH_CHECK(offset + target.nbytes() <= payload.size(), "a collective got ", payload.size(), " bytes, too few");
    auto options = target.options();
    target.copy_(at::from_blob(const_cast<char*>(payload.data()) + offset, target.sizes(), options));
  }

 private:
  static std::string bytes_of(const std::vector<View>& views) {
    std::string payload;
    for (const auto& view : views) {
      auto tensor = view.on_host().contiguous();
      payload.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    }
    return payload;
  }

  static void write(const std::string& path, const std::string& bytes) {
    std::ofstream file(path + ".new", std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    TORCH_CHECK(file.good() && std::rename((path + ".new").c_str(), path.c_str()) == 0, "cannot write ", path);
  }

  static bool load(const std::string& path, std::string& bytes) {
    std::ifstream file(path, std::ios::binary);
    if (!file.good()) return false;
    bytes.assign(std::istreambuf_iterator<char>(file), {});
    return true;
  }

  bool read(int64_t number, int64_t peer, const std::string& label, std::string& payload) {
    std::string bytes;
    if (!load(path(number, peer), bytes)) return false;
    size_t end = bytes.find('\n');
    if (bytes.substr(0, end) != label) {
      completed_ = number + 1;
      TORCH_CHECK(
          false, "call ", number, " of the group: rank ", rank_, " calls ", label, ", rank ", peer, " calls ",
          bytes.substr(0, end));
    }
    payload = bytes.substr(end + 1);
    return true;
  }

  std::string path(int64_t number, int64_t rank) const {
    return folder_ + "/" + std::to_string(number) + "-" + std::to_string(rank);
  }
  std::string message(int64_t from, int64_t to, int64_t tag, int64_t number) const {
    return folder_ + "/" + std::to_string(from) + "-to-" + std::to_string(to) + "-" + std::to_string(tag) + "-" +
        std::to_string(number);
  }

  std::string folder_;
  int64_t rank_, size_, called_ = 0;
  std::atomic<int64_t> completed_{0};
  std::map<std::pair<int64_t, int64_t>, int64_t> sent_, received_;
};

void check_group_tensors(const std::vector<at::Tensor>& tensors, const std::string& label) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK(on_device(tensor), label, ": the group is for tensors on ", device(), ", not on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), label, ": the tensor is not contiguous");
  }
}

// What a rank receives: for each output, the rank that sent it and the first of its bytes.
struct Part {
  View view;
  int64_t rank;
  size_t offset;
};

void exchange(
    Communicator& group,
    const std::string& label,
    const std::vector<at::Tensor>& inputs,
    const std::vector<std::tuple<at::Tensor, int64_t, size_t>>& outputs) {
  check_group_tensors(inputs, label);
  std::vector<Part> parts;
  for (const auto& [tensor, rank, offset] : outputs) {
    check_group_tensors({tensor}, label);
    parts.push_back({View(tensor), rank, offset});
  }
  group.call(label, inputs, [parts](const Communicator::Payloads& payloads) {
    for (const auto& part : parts) Communicator::fill(part.view, payloads.at(part.rank), part.offset);
  });
}

// `outputs[i]` becomes what rank i has for this one. Sizes may differ between pairs.
void all_to_all(
    Communicator& group,
    const std::string& label,
    const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& outputs) {
  check_group_tensors(inputs, label);
  check_group_tensors(outputs, label);
  std::vector<int64_t> sizes;
  for (const auto& tensor : inputs) sizes.push_back(static_cast<int64_t>(tensor.nbytes()));
  std::string head(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
  std::vector<View> views;
  for (const auto& tensor : outputs) views.emplace_back(tensor);
  auto finish = [views, rank = group.rank()](const Communicator::Payloads& payloads) {
    for (size_t peer = 0; peer < views.size(); ++peer) {
      std::vector<int64_t> table(views.size());
      std::memcpy(table.data(), payloads[peer].data(), table.size() * sizeof(int64_t));
      size_t begin = table.size() * sizeof(int64_t);
      for (int64_t before = 0; before < rank; ++before) begin += table[before];
      Communicator::fill(views[peer], payloads[peer], begin);
    }
  };
  group.call(label, inputs, finish, head);
}

// `output` becomes the reduction of what all ranks have in their input, from `offset` elements on.
void reduce(
    Communicator& group,
    const std::string& label,
    const at::Tensor& input,
    const at::Tensor& output,
    int64_t offset,
    const std::string& op) {
  check_group_tensors({input, output}, label);
  TORCH_CHECK(input.scalar_type() == output.scalar_type(), label, ": input and output differ in dtype");
  group.call(label, {input}, [view = View(output), offset, op](const Communicator::Payloads& payloads) {
    auto target = view.on_host();
    auto sum_dtype = at::isReducedFloatingType(view.dtype) ? at::kFloat : view.dtype;
    at::Tensor total;
    for (const auto& payload : payloads) {
      auto value = at::empty_like(target);
      View piece(value);
      Communicator::fill(piece, payload, offset * target.element_size());
      value = value.to(sum_dtype);
      if (!total.defined()) total = value;
      else if (op == "product") total = total * value;
      else if (op == "min") total = at::minimum(total, value);
      else if (op == "max") total = at::maximum(total, value);
      else total = total + value;
    }
    if (op == "average") total = total / static_cast<double>(payloads.size());
    target.copy_(total);
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::get().owns(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_kernel>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macros want this name
#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define INTO_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_THE_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(INTO_FLOAT32)
  AT_FORALL_PROMOTE(IN_THE_WIDEST)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_source_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &can_exchange_data);
  library.impl("native_dropout", &native_dropout);
  // torch's composite kernel rounds to the lower precision in between; a device has one of its own, as the CPU does.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&queue_kernel>());
  // torch's composite kernel writes to a given tensor, which the CPU's kernel resizes for a while.
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&queue_kernel>());
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(DEVICE, &Allocator::get());
  at::RegisterPrivateUse1HooksInterface(new Hooks);

  using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("set_policy", [](std::vector<int64_t> starved, std::optional<uint64_t> seed, double patience_s) {
    Scheduler::get().set_policy(starved, seed, patience_s);
  });
  module.def("stop", [] { Scheduler::get().stop(); }, NoGil());
  module.def("waits", [] { return waits.counts(); });
  module.def("launches", [] { return Scheduler::get().launches.load(); });
  module.def("allocations", [] { return Allocator::get().allocations.load(); });
  module.def("reset_counts", [] {
    waits.reset();
    Scheduler::get().launches = 0;
    Allocator::get().allocations = 0;
  });
  module.def("poison_when_freed", [](bool wanted) { Allocator::get().poison_when_freed = wanted; });
  module.def("allow_unpinned", [](bool allowed) { unpinned_is_an_error = !allowed; });
  pybind11::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(pybind11::init<std::string, int64_t, int64_t>())
      .def("exchange", &exchange, NoGil())
      .def("all_to_all", &all_to_all, NoGil())
      .def("reduce", &reduce, NoGil())
      .def("send", &Communicator::send)
      .def("recv", &Communicator::recv);
  module.def("default_generator", [] { return default_generator(); });
}

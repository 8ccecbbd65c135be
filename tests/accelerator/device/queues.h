// Streams, events, the worker that runs what is queued, and the log of what the program does.

#pragma once

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

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <list>
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

constexpr int MOST_DEVICES = 8;
constexpr int64_t HOST = -1;  // the program, where the log has a stream

// Which devices there are, and where each thread is.
std::atomic<int> device_count{1};
thread_local int current_device = 0;
thread_local std::array<int64_t, MOST_DEVICES> streams_of_thread = {0, 1, 2, 3, 4, 5, 6, 7};  // the default ones

c10::Device device() { return c10::Device(DEVICE, static_cast<c10::DeviceIndex>(current_device)); }
int64_t current_stream() { return streams_of_thread[current_device]; }

// Devices on which this process has a context, which takes memory there.
class Contexts {
 public:
  void touch(int device) {
    std::lock_guard lock(mutex_);
    touched_.insert(device);
  }
  std::set<int> touched() {
    std::lock_guard lock(mutex_);
    return touched_;
  }
  void forget() {
    std::lock_guard lock(mutex_);
    touched_.clear();
  }

 private:
  std::mutex mutex_;
  std::set<int> touched_;
};

Contexts contexts;

// ---------------------------------------------------------------------------------------------------------------------
// The log of what the program does, in its order

struct Entry {
  std::string kind;  // "kernel", "record", "wait", "drain", "collective", "message", "alloc", "free"
  int64_t stream;
  std::string key;  // of an event, or a group
  std::string label;
  int64_t count;  // kernels, or bytes
};

class Log {
 public:
  void add(const char* kind, int64_t stream, std::string key, std::string label, int64_t count) {
    if (!wanted) return;
    std::lock_guard lock(mutex_);
    entries_.push_back({kind, stream, std::move(key), std::move(label), count});
  }
  std::vector<Entry> taken() {
    std::lock_guard lock(mutex_);
    return std::move(entries_);
  }
  std::atomic<bool> wanted{false};

 private:
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

Log journal;

// ---------------------------------------------------------------------------------------------------------------------
// Queues

// An event: how often it was recorded, how many of these the worker has come to, and when it came to the last.
struct EventState {
  int64_t id = next_id++;
  bool captured = false;  // recorded last in a graph
  int64_t recorded = 0;
  int64_t reached = 0;
  Clock::time_point at{};

  std::string name(int64_t version) const { return std::to_string(id) + ":" + std::to_string(version); }

 private:
  inline static std::atomic<int64_t> next_id{0};
};

struct Task {
  enum Kind { RUN, RECORD, WAIT, POLL } kind = RUN;
  std::function<void()> run;
  std::function<bool()> poll;  // whether it is complete
  std::shared_ptr<EventState> event;
  int64_t version = 0;
  int64_t number = 0;  // in the order of the program
  bool started = false;
};

struct Graph {
  std::vector<Task> tasks;
};

struct Queue {
  std::deque<Task> tasks;
  int device = 0;
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
    queues_.back()->device = current_device;
    return static_cast<int64_t>(queues_.size()) - 1;
  }

  int device_of(int64_t stream) {
    std::lock_guard lock(mutex_);
    return queues_.at(stream)->device;
  }

  // `count`: how many kernels CUDA would launch for it.
  void enqueue(int64_t stream, std::function<void()> run, const std::string& label = "", int64_t count = 1) {
    if (count > 0) {
      first_launch(label);
      journal.add("kernel", stream, "", label, count);
    }
    push(stream, {Task::RUN, std::move(run), nullptr, nullptr, 0});
    launches += count;
  }

  void enqueue_poll(int64_t stream, std::function<bool()> poll) {
    push(stream, {Task::POLL, nullptr, std::move(poll), nullptr, 0});
  }

  // `by_program`: whether it goes to the log.
  void record(int64_t stream, const std::shared_ptr<EventState>& event, bool by_program = true) {
    std::unique_lock lock(mutex_);
    ++event->recorded;
    if (by_program) journal.add("record", stream, event->name(event->recorded), "", 0);
    if ((event->captured = captured_.count(stream) > 0)) return;
    push_locked(stream, {Task::RECORD, nullptr, nullptr, event, event->recorded});
  }

  void wait(int64_t stream, const std::shared_ptr<EventState>& event, bool by_program = true) {
    std::unique_lock lock(mutex_);
    if (by_program) journal.add("wait", stream, event->name(event->recorded), "", 0);
    if (event->captured) {
      captured_.insert(stream);  // it joins the graph
      return;
    }
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

  // The program asks, which CUDA allows no thread while another captures a graph.
  bool query(const std::shared_ptr<EventState>& event) {
    refuse_while_capturing("an event is asked whether it is complete");
    return reached(event);
  }

  bool empty(int64_t stream) {
    std::lock_guard lock(mutex_);
    return queues_.at(stream)->tasks.empty();
  }

  // The host waits. Raises the error of a kernel that has failed since the last time.
  void synchronize(const std::shared_ptr<EventState>& event) {
    refuse_while_capturing("the program waits for the device");
    journal.add("wait", HOST, event->name(event->recorded), "", 0);
    block([&, version = event->recorded] { return event->reached >= version; });
  }

  void synchronize_stream(int64_t stream) {
    auto event = std::make_shared<EventState>();
    record(stream, event);
    synchronize(event);
  }

  void synchronize_all(bool by_program = true) {
    if (by_program) {
      refuse_while_capturing("the program waits for the device");
      journal.add("drain", HOST, "", "", 0);
    }
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

  // How many queues of the hardware each device has for its streams; 0: one for each. The first task of such a queue
  // holds up all others in it until it has started.
  void set_hardware_queues(int64_t count) {
    std::lock_guard lock(mutex_);
    hardware_queues_ = count;
    work_.notify_all();
  }

  // Have allocations and first launches wait for the device now and then, as drivers do.
  void set_blocking(std::optional<uint64_t> seed) {
    std::lock_guard lock(mutex_);
    blocking_ = seed ? std::optional<std::mt19937_64>(*seed) : std::nullopt;
    launched_.clear();
  }
  void may_block() {
    {
      std::lock_guard lock(mutex_);
      if (!blocking_ || (*blocking_)() % 4 != 0) return;
      ++blocked;
    }
    synchronize_all(false);
  }

  // Graphs: what goes to the captured streams is kept instead of run.
  void begin_capture(int64_t stream) {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(captured_.empty(), "a graph is being captured already");
    captured_ = {stream};
    graph_.clear();
    spoiled_.clear();
  }
  std::vector<Task> end_capture() {
    std::lock_guard lock(mutex_);
    captured_.clear();
    TORCH_CHECK(spoiled_.empty(), "the capture of a graph has failed: ", spoiled_);
    return std::move(graph_);
  }
  bool is_captured(int64_t stream) {
    std::lock_guard lock(mutex_);
    return captured_.count(stream) > 0;
  }
  void replay(int64_t stream, const std::vector<Task>& graph) {
    std::lock_guard lock(mutex_);
    for (const Task& task : graph) push_locked(stream, task);
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
  std::atomic<int64_t> blocked{0};

 private:
  Scheduler() {
    for (int device = 0; device < MOST_DEVICES; ++device) {  // their default streams
      queues_.push_back(std::make_unique<Queue>());
      queues_.back()->device = device;
    }
    worker_ = std::thread([this] { work(); });
  }

  void push(int64_t stream, Task task) {
    std::lock_guard lock(mutex_);
    push_locked(stream, std::move(task));
  }

  void push_locked(int64_t stream, Task task) {
    if (captured_.count(stream) > 0) {
      graph_.push_back(std::move(task));
      return;
    }
    task.number = pushed_++;
    queues_.at(stream)->tasks.push_back(std::move(task));
    active_ = Clock::now();
    work_.notify_all();
  }

  void refuse_while_capturing(const char* what) {
    std::lock_guard lock(mutex_);
    if (captured_.empty()) return;
    spoiled_ = what;
    TORCH_CHECK(false, what, ", which is not permitted while a stream is capturing");
  }

  void first_launch(const std::string& label) {
    {
      std::lock_guard lock(mutex_);
      if (!blocking_ || !launched_.insert(label).second) return;
    }
    may_block();
  }

  template <class Condition>
  void block(Condition is_over) {
    std::optional<pybind11::gil_scoped_release> without_gil;  // the worker may need it
    if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
    std::unique_lock lock(mutex_);
    if (!is_over()) {
      auto place = hosts_waiting_.insert(hosts_waiting_.end(), [&] { return is_over(); });
      work_.notify_all();
      done_.wait(lock, [&] { return is_over() || stopped_; });
      hosts_waiting_.erase(place);
    }
    if (!error_.empty()) {
      std::string error;
      error.swap(error_);
      lock.unlock();
      TORCH_CHECK(false, "a kernel of the simulated accelerator has failed: ", error);
    }
  }

  // Whether an earlier task in the queue's hardware queue has not started.
  bool is_held_up(const Queue& queue, size_t index) {
    for (size_t other = 0; other < queues_.size(); ++other) {
      const Queue& candidate = *queues_[other];
      if (other == index || candidate.device != queue.device) continue;
      if (static_cast<int64_t>(other) % hardware_queues_ != static_cast<int64_t>(index) % hardware_queues_) continue;
      size_t first = !candidate.tasks.empty() && candidate.tasks.front().started ? 1 : 0;
      if (first < candidate.tasks.size() && candidate.tasks[first].number < queue.tasks.front().number) return true;
    }
    return false;
  }

  // The queue whose first task is next, or none. `again`: when to look again at the latest.
  Queue* choose(Clock::time_point now, Clock::time_point& again, bool& out_of_patience) {
    std::vector<Queue*> ready, starved;
    for (size_t index = 0; index < queues_.size(); ++index) {
      auto& queue = queues_[index];
      if (queue->tasks.empty()) continue;
      const Task& task = queue->tasks.front();
      if (hardware_queues_ > 0 && !task.started && is_held_up(*queue, index)) continue;
      if (task.kind == Task::WAIT && task.event->reached < task.version) continue;
      if (task.kind == Task::POLL && queue->stalled_until > now) {
        again = std::min(again, queue->stalled_until);
        continue;
      }
      (queue->starved ? starved : ready).push_back(queue.get());
    }
    if (ready.empty() && !starved.empty()) {
      // A host whose wait is over may not have come on yet.
      bool a_host_waits = std::any_of(hosts_waiting_.begin(), hosts_waiting_.end(), [](auto& over) { return !over(); });
      out_of_patience = !a_host_waits && now - active_ >= patience_;
      if (a_host_waits || out_of_patience) {
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
      queue->tasks.front().started = true;
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
  std::list<std::function<bool()>> hosts_waiting_;  // what each waits for
  std::string error_;
  bool stopped_ = false;
  int64_t pushed_ = 0, hardware_queues_ = 0;
  std::optional<std::mt19937_64> blocking_;
  std::set<std::string> launched_;
  std::set<int64_t> captured_;
  std::vector<Task> graph_;
  std::string spoiled_;  // why the capture has failed
  std::thread worker_;
};

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
  Scheduler::get().synchronize_stream(current_stream());
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events, as torch's generic code sees them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device other) const override {
    auto before = device();
    setDevice(other);
    return before;
  }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device other) const override {
    TORCH_CHECK(other.index() < device_count, "there is no device ", other);
    if (other.has_index()) current_device = other.index();
  }
  void uncheckedSetDevice(c10::Device other) const noexcept override { current_device = other.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count.load()); }

  c10::Stream getStream(c10::Device of) const override { return stream(of, streams_of_thread[index_of(of)]); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(of, index_of(of)); }
  c10::Stream getNewStream(c10::Device of, int) const override { return made_on(of); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return made_on(of); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto& own = streams_of_thread[index_of(other.device())];
    auto before = stream(other.device(), own);
    own = other.id();
    return before;
  }
  bool queryStream(const c10::Stream& of) const override { return Scheduler::get().empty(of.id()); }
  void synchronizeStream(const c10::Stream& of) const override {
    waits.count("stream");
    contexts.touch(index_of(of.device()));
    Scheduler::get().synchronize_stream(of.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    waits.count("device");
    contexts.touch(current_device);
    Scheduler::get().synchronize_all();
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    contexts.touch(index_of(on.device()));
    if (*event == nullptr) *event = new std::shared_ptr<EventState>(std::make_shared<EventState>());
    Scheduler::get().record(on.id(), state(*event));
  }
  void block(void* event, const c10::Stream& on) const override {
    contexts.touch(index_of(on.device()));
    if (event != nullptr) Scheduler::get().wait(on.id(), state(event));
  }
  // As in CUDA, these two work on the device of the thread, whatever that of the event is.
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    contexts.touch(current_device);
    return Scheduler::get().query(state(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    waits.count("event");
    contexts.touch(current_device);
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
  static int index_of(c10::Device of) { return of.has_index() ? of.index() : current_device; }
  static c10::Stream stream(c10::Device of, int64_t id) {
    auto whole = c10::Device(DEVICE, static_cast<c10::DeviceIndex>(index_of(of)));
    return c10::Stream(c10::Stream::UNSAFE, whole, id);
  }
  static c10::Stream made_on(c10::Device of) {
    int before = current_device;
    current_device = index_of(of);
    auto id = Scheduler::get().new_stream();
    current_device = before;
    return stream(of, id);
  }
  static std::shared_ptr<EventState>& state(void* event) { return *static_cast<std::shared_ptr<EventState>*>(event); }
};

}  // namespace

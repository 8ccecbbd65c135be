// Collectives with the semantics of NCCL.

#pragma once

#include "kernels.h"

namespace {


// A group of processes. Each collective is a file of every rank in a folder that all of them see.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  using Payloads = std::vector<std::string>;

  Communicator(std::string folder, int64_t rank, int64_t size) : folder_(std::move(folder)), rank_(rank), size_(size) {}

  // Wait on the host until all ranks of the group are here, as NCCL does in the first call. Refuses two on one device.
  void connect(const std::string& own_device, double timeout_s) {
    write(folder_ + "/device-" + std::to_string(rank_), own_device);
    auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    for (int64_t peer = 0; peer < size_; ++peer) {
      std::string theirs;
      while (!load(folder_ + "/device-" + std::to_string(peer), theirs)) {
        TORCH_CHECK(!aborted_, "the group was aborted");
        TORCH_CHECK(Clock::now() < end, "rank ", rank_, " waits for rank ", peer, " to make its first call of the group");
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      TORCH_CHECK(
          peer == rank_ || theirs != own_device, "duplicate device: ranks ", peer, " and ", rank_, " are both on ", theirs);
    }
  }

  // End what is queued, also what waits for other ranks, and refuse what comes later.
  void abort() { aborted_ = true; }

  // Queue a collective: every rank publishes its inputs, and `finish` computes the outputs from those of all ranks.
  void call(
      const std::string& label,
      const std::vector<at::Tensor>& inputs,
      std::function<void(const Payloads&)> finish,
      const std::string& head = "") {
    std::vector<View> views;
    for (const auto& tensor : inputs) views.emplace_back(tensor);
    TORCH_CHECK(!aborted_, label, ": the group was aborted");
    journal.add("collective", current_stream(), folder_, label, 1);
    int64_t number = called_++;
    auto payloads = std::make_shared<Payloads>(size_);
    auto missing = std::make_shared<std::set<int64_t>>();
    for (int64_t rank = 0; rank < size_; ++rank) missing->insert(rank);
    auto self = shared_from_this();
    auto published = std::make_shared<bool>(false);
    Scheduler::get().enqueue_poll(current_stream(), [=] {
      if (self->aborted_) return true;
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
    journal.add("message", current_stream(), path, "send", 1);
    Scheduler::get().enqueue_poll(current_stream(), [self, path, view = View(tensor)] {
      write(path, bytes_of({view}));
      return true;
    });
  }
  void recv(const at::Tensor& tensor, int64_t peer, int64_t tag) {
    auto self = shared_from_this();
    auto path = message(peer, rank_, tag, received_[{peer, tag}]++);
    journal.add("message", current_stream(), path, "recv", 1);
    Scheduler::get().enqueue_poll(current_stream(), [self, path, view = View(tensor)] {
      std::string payload;
      if (self->aborted_) return true;
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
  std::atomic<bool> aborted_{false};
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

}  // namespace

// Operators of torch: queued as kernels, counted as CUDA launches them; and random numbers.

#pragma once

#include "memory.h"

namespace {

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

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

// The device of an operator's tensors becomes that of the thread, as code for CUDA has it.
class OnTheirDevice {
 public:
  explicit OnTheirDevice(const torch::jit::Stack& arguments) {
    std::optional<c10::Device> found;
    for (const auto& value : arguments) {
      if (value.isDevice() && value.toDevice().type() == DEVICE && value.toDevice().has_index()) found = value.toDevice();
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (!on_device(tensor)) return;
        TORCH_CHECK(
            !found || *found == tensor.device(),
            "expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
            tensor.device());
        found = tensor.device();
      });
    }
    guard_.reset_device(found.value_or(device()));
    contexts.touch(current_device);
  }
  explicit OnTheirDevice(const at::Tensor& tensor) : OnTheirDevice(torch::jit::Stack{tensor}) {}

 private:
  c10::OptionalDeviceGuard guard_;
};

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

// How many kernels CUDA launches for an operator. Those on lists of tensors have a fast path, which takes so many at a
// time; it is for lists whose tensors have one dtype, and agree with each other in sizes and strides, without gaps.
bool on_the_fast_path(const std::vector<std::vector<at::Tensor>>& lists, bool one_dtype_for_all) {
  for (const auto& list : lists) {
    for (size_t place = 0; place < list.size(); ++place) {
      const at::Tensor &tensor = list[place], &first = lists[0][place];
      if (!on_device(tensor) || tensor.device() != first.device() || tensor.layout() != at::kStrided) return false;
      if (tensor.scalar_type() != (one_dtype_for_all ? lists[0][0] : list[0]).scalar_type()) return false;
      if (tensor.sizes() != first.sizes() || tensor.strides() != first.strides()) return false;
      if (!tensor.is_non_overlapping_and_dense()) return false;
    }
  }
  return true;
}

int64_t kernels_of(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  static const std::vector<int64_t> at_a_time = {110, 110, 64, 48, 36, 30};  // by the number of lists
  const std::string& name = schema.name();
  bool foreach = name.rfind("aten::_foreach_", 0) == 0, fused = name.rfind("aten::_fused_", 0) == 0;
  bool split = name == "aten::split_with_sizes_copy", chunk_cat = name == "aten::_chunk_cat", cat = name == "aten::cat";
  if (!foreach && !fused && !split && !chunk_cat && !cat) return 1;
  std::vector<std::vector<at::Tensor>> lists;
  for (const auto& value : arguments) {
    if (value.isTensorList()) lists.push_back(value.toTensorVector());
  }
  if (lists.empty() || lists[0].empty()) return 0;
  auto count = static_cast<int64_t>(lists[0].size());
  auto contiguous = [](const at::Tensor& tensor) { return tensor.is_contiguous(); };
  bool all_contiguous = std::all_of(lists[0].begin(), lists[0].end(), contiguous);
  if (split) {  // one kernel if each part is written in whole rows
    return arguments[0].toTensor().is_contiguous() && all_contiguous ? 1 : count;
  }
  if (chunk_cat) return all_contiguous ? 1 : 2 * count + 1;
  if (cat) return all_contiguous ? (count + 127) / 128 : count;
  if (fused || on_the_fast_path(lists, name != "aten::_foreach_copy_")) {
    int64_t most = at_a_time[std::min(lists.size(), at_a_time.size() - 1)];
    return (count + most - 1) / most;
  }
  return count;
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
  journal.add("kernel", current_stream(), "", schema.name(), 1);
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
      Scheduler::get().enqueue(current_stream(), [view, tensor] { view.on_host().copy_(tensor); }, "", 0);
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
  OnTheirDevice guard(arguments);
  int64_t kernels = kernels_of(schema, arguments);

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
  Scheduler::get().enqueue(current_stream(), [op, parts, targets, seed, generator_place] {
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
  }, schema.name(), kernels);
  for (auto& value : given) stack->push_back(std::move(value));
}

at::Tensor empty(
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> where,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(where);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &Allocator::get(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> where,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(where);
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
  c10::OptionalDeviceGuard guard(own->device());
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
  OnTheirDevice guard(on_device(target) ? target : source);
  TORCH_CHECK(source.sizes() == target.sizes() || at::is_expandable_to(source.sizes(), target.sizes()));
  auto expanded = source.expand_as(target);
  bool from_host = !on_device(expanded), to_host = !on_device(target);
  auto& scheduler = Scheduler::get();
  if (!from_host && !to_host) {
    // As CUDA: between devices on the stream of the source, which waits for that of the target, and is waited for.
    int64_t stream = current_stream(), of_source = streams_of_thread[expanded.device().index()];
    auto meet = [&](int64_t first, int64_t second) {
      if (first == second) return;
      auto event = std::make_shared<EventState>();
      scheduler.record(first, event, false);
      scheduler.wait(second, event, false);
    };
    meet(stream, of_source);
    scheduler.enqueue(of_source, [from = View(expanded), to = View(target)] {
      to.on_host().copy_(from.on_host());
    }, "aten::copy_");
    meet(of_source, stream);
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
  auto copy = [from = View(expanded), to = View(target)] { to.on_host().copy_(from.on_host()); };
  scheduler.enqueue(current_stream(), copy, from_host ? "copy from host" : "copy to host");
  if (non_blocking && pinned) {
    PinnedAllocator::get().use(host.data_ptr(), current_stream());
  } else {
    wait_for_current_stream(from_host ? "copy from host" : "copy to host");
  }
  return target;
}

// Copies of a list, in one kernel where that has a fast path.
void foreach_copy_(at::TensorList self, at::TensorList source, bool non_blocking) {
  std::vector<std::vector<at::Tensor>> lists = {self.vec(), source.vec()};
  if (self.empty() || !on_the_fast_path(lists, false)) {
    for (size_t place = 0; place < self.size(); ++place) lists[0][place].copy_(source[place], non_blocking);
    return;
  }
  OnTheirDevice guard(self[0]);
  std::vector<std::pair<View, View>> copies;
  for (size_t place = 0; place < self.size(); ++place) copies.emplace_back(View(source[place]), View(self[place]));
  auto copy = [copies] {
    for (const auto& [from, to] : copies) to.on_host().copy_(from.on_host());
  };
  Scheduler::get().enqueue(current_stream(), copy, "aten::_foreach_copy_", (static_cast<int64_t>(self.size()) + 63) / 64);
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
  OnTheirDevice guard(input);
  auto output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(at::kBool));
  double kept = train.value_or(true) ? 1 - p : 1;
  uint64_t seed = generator_of({})->next();
  Scheduler::get().enqueue(current_stream(), [kept, seed, from = View(input), to = View(output), where = View(mask)] {
    auto mask = where.on_host().bernoulli_(kept, at::detail::createCPUGenerator(seed));
    to.on_host().copy_(kept == 0 ? at::zeros_like(from.on_host()) : from.on_host() * mask / kept);
  }, "aten::native_dropout");
  return {output, mask};
}

at::Scalar local_scalar(const at::Tensor& self) {
  OnTheirDevice guard(self);
  wait_for_current_stream("item");
  return View(self).on_host().item();
}

}  // namespace

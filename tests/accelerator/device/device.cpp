// A simulated accelerator for tests, as a PrivateUse1 device of torch.
//
// Kernels are queued on streams and run later, by one worker thread, on the host. The worker chooses among the streams
// by a policy, so that a program with a missing wait computes wrong values. Memory is filled with NaN on the stream that
// owns it before that uses it again, so that memory that is freed or used too early shows, too. Queued kernels hold
// pointers, sizes and dtypes, never tensors: they keep no memory alive.

#include "groups.h"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count.load()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    TORCH_CHECK(index < device_count, "there is no device number ", static_cast<int>(index));
    current_device = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
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
  library.impl("_foreach_copy_", &foreach_copy_);
  for (const char* name : {
           "_foreach_add.List", "_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_add_.Tensor",
           "_foreach_addcdiv_.Scalar", "_foreach_addcdiv_.ScalarList", "_foreach_addcdiv_.Tensor",
           "_foreach_addcmul_.Scalar", "_foreach_div_.Scalar", "_foreach_div_.ScalarList", "_foreach_div_.List",
           "_foreach_div_.Tensor", "_foreach_lerp_.Scalar", "_foreach_maximum_.List", "_foreach_mul.Scalar",
           "_foreach_mul_.Scalar", "_foreach_mul_.ScalarList", "_foreach_mul_.List", "_foreach_mul_.Tensor",
           "_foreach_neg_", "_foreach_norm.Scalar", "_foreach_reciprocal_", "_foreach_sqrt", "_foreach_sqrt_",
           "_foreach_sub_.Scalar", "_foreach_zero_", "_chunk_cat", "_chunk_cat.out", "split_with_sizes_copy.out",
           "_fused_adam_", "_fused_adamw_", "_fused_sgd_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&queue_kernel>());
  }
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
  module.def("set_devices", [](int count) {
    TORCH_CHECK_VALUE(0 < count && count <= MOST_DEVICES, "there may be 1 to ", MOST_DEVICES, " devices, not ", count);
    device_count = count;
  });
  module.def("devices", [] { return device_count.load(); });
  module.def("device_of", [](int64_t stream) { return Scheduler::get().device_of(stream); });
  module.def("contexts", [] { return contexts.touched(); });
  module.def("forget_contexts", [] { contexts.forget(); });
  module.def("hardware_queues", [](int64_t count) { Scheduler::get().set_hardware_queues(count); });
  module.def("set_blocking", [](std::optional<uint64_t> seed) { Scheduler::get().set_blocking(seed); });
  module.def("blocked", [] { return Scheduler::get().blocked.load(); });
  module.def("log", [](bool wanted) {
    journal.wanted = wanted;
    pybind11::list found;
    for (auto& each : journal.taken()) {
      found.append(pybind11::make_tuple(each.kind, each.stream, each.key, each.label, each.count));
    }
    return found;
  });
  pybind11::class_<Graph>(module, "Graph");
  module.def("begin_capture", [] { Scheduler::get().begin_capture(current_stream()); });
  module.def("end_capture", [] { return Graph{Scheduler::get().end_capture()}; });
  module.def("is_capturing", [] { return Scheduler::get().is_captured(current_stream()); });
  module.def("replay", [](const Graph& graph) { Scheduler::get().replay(current_stream(), graph.tasks); });
  module.def("poison_when_freed", [](bool wanted) { Allocator::get().poison_when_freed = wanted; });
  module.def("allow_unpinned", [](bool allowed) { unpinned_is_an_error = !allowed; });
  pybind11::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(pybind11::init<std::string, int64_t, int64_t>())
      .def("connect", &Communicator::connect, NoGil())
      .def("abort", &Communicator::abort)
      .def("exchange", &exchange, NoGil())
      .def("all_to_all", &all_to_all, NoGil())
      .def("reduce", &reduce, NoGil())
      .def("send", &Communicator::send)
      .def("recv", &Communicator::recv);
  module.def("default_generator", [] { return default_generator(); });
}

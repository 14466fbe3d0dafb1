// Python's door to the operations: checks tensors, allocates results, picks the instruction set. The contracts are in
// pd/runtime/engine/cpu_ops.py.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "contexts.h"
#include "ops.h"
#include "shm_group.h"
#include "tensors.h"

namespace pd {

void parallel_for(int64_t size, int64_t grain, Body body, const void* context) {
  at::parallel_for(0, size, grain, [=](int64_t begin, int64_t end) { body(context, begin, end); });
}

namespace {

bool runs(const std::string& name) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (name == "avx2") return avx2;
  if (name == "avx512") return avx512;
  return name == "avx512_bf16" && avx512 && __builtin_cpu_supports("avx512bf16");
}

const Table* all_tables[] = {&table_avx512bf16(), &table_avx512(), &table_avx2()};

std::vector<std::string> available() {  // the best first
  std::vector<std::string> names;
  for (const Table* table : all_tables)
    if (runs(table->name)) names.push_back(table->name);
  return names;
}

const Table* chosen = nullptr;

void use(const std::string& name) {
  TORCH_CHECK(runs(name), "this CPU does not run ", name);
  for (const Table* table : all_tables)
    if (name == table->name) chosen = table;
}

// ---- linear ---------------------------------------------------------------------------------------------------------

template <class T> void fill_panels(const T* weight, T* panels, int64_t outputs, int64_t inputs, int64_t together) {
  const int64_t groups = (inputs + together - 1) / together;
  at::parallel_for(0, (outputs + PANEL - 1) / PANEL, 16, [=](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < outputs; ++lane)
        for (int64_t i = 0; i < inputs; ++i)
          panels[((panel * groups + i / together) * PANEL + lane) * together + i % together] =
              weight[(panel * PANEL + lane) * inputs + i];
  });
}

Tensor pack(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be a contiguous matrix, is ", weight.sizes());
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = (outputs + PANEL - 1) / PANEL;
  const void* from = weight.const_data_ptr();
  if (is_bf16(weight, "weight")) {
    Tensor packed = at::zeros({panels, (inputs + 1) / 2, PANEL, 2}, weight.options());
    auto* to = static_cast<uint16_t*>(packed.mutable_data_ptr());
    fill_panels(static_cast<const uint16_t*>(from), to, outputs, inputs, 2);
    return packed;
  }
  Tensor packed = at::zeros({panels, inputs, PANEL}, weight.options());
  fill_panels(static_cast<const float*>(from), packed.mutable_data_ptr<float>(), outputs, inputs, 1);
  return packed;
}

Tensor linear(const Tensor& x, const Tensor& panels, int64_t outputs, const std::optional<Tensor>& bias) {
  const bool half = is_bf16(x, "x");
  check_rows(x, "x");
  check_like(panels, x, "weight");
  const int64_t inputs = x.size(-1);
  TORCH_CHECK(panels.size(1) == (half ? (inputs + 1) / 2 : inputs) && panels.size(0) == (outputs + PANEL - 1) / PANEL,
              "x has ", inputs, " inputs, the packed weight is ", panels.sizes(), " for ", outputs, " outputs");
  if (bias) {
    check_dense(*bias, x.scalar_type(), "bias");
    TORCH_CHECK(bias->numel() == outputs, "bias has ", bias->numel(), " elements for ", outputs, " outputs");
  }
  const Tensor rows = as_rows(x);
  Tensor y = with_last(x, outputs);
  const Linear job = {rows.const_data_ptr(), rows.stride(0), panels.const_data_ptr(),
                      bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), rows.size(0), inputs, outputs,
                      scratch(chosen->linear_scratch(rows.size(0), inputs))};
  if (job.rows > 0) (half ? chosen->linear_bf16 : chosen->linear_f32)(job);
  return y;
}

// ---- attention ------------------------------------------------------------------------------------------------------

Tensor paged_decode(const Tensor& q, const std::tuple<Tensor, Tensor>& pools, const std::tuple<Tensor, Tensor>& context,
                    const Tensor& kv_head_of, double scale, int64_t window) {
  const auto& [table, lengths] = context;
  const bool half = is_bf16(q, "q");
  const Paged pool = check_attention(q, pools, kv_head_of);
  const int64_t rows = q.size(0), heads = q.size(1), kv_heads = std::get<0>(pools).size(1), size = q.size(2);
  check_context(table, lengths, rows, std::get<0>(pools));
  const Parts parts = cut(lengths.const_data_ptr<int32_t>(), rows, window);
  const Groups groups = group(kv_head_of.const_data_ptr<int32_t>(), heads, kv_heads);
  const int64_t num_parts = static_cast<int64_t>(parts.row.size()), partial_size = chosen->partial_size(size);
  Tensor out = at::empty(q.sizes(), q.options());
  const Attention job = {
      q.const_data_ptr(), q.stride(0), q.stride(1), pool, table.const_data_ptr<int32_t>(), table.stride(0),
      parts.row.data(), parts.start.data(), parts.stop.data(), num_parts, groups.heads.data(), groups.start.data(),
      kv_heads, heads, size, static_cast<float>(scale),
      static_cast<float*>(scratch(num_parts * heads * partial_size * 4)), partial_size, out.mutable_data_ptr(),
      parts.of_row.data(), rows};
  if (rows > 0) (half ? chosen->attend_bf16 : chosen->attend_f32)(job);
  return out;
}

Tensor paged_prefill(const Tensor& q, const std::tuple<Tensor, Tensor>& pools,
                     const std::tuple<Tensor, Tensor, Tensor>& chunks, const Tensor& kv_head_of, double scale,
                     int64_t window) {
  const auto& [first_row, lengths, table] = chunks;
  const bool half = is_bf16(q, "q");
  const Paged pool = check_attention(q, pools, kv_head_of);
  const int64_t heads = q.size(1), kv_heads = std::get<0>(pools).size(1);
  check_dense(first_row, at::kInt, "first_row");
  TORCH_CHECK(first_row.numel() == lengths.numel() + 1, first_row.numel(), " first rows of ", lengths.numel(), " chunks");
  check_context(table, lengths, lengths.numel(), std::get<0>(pools));
  const Tiles tiles =
      tile(first_row.const_data_ptr<int32_t>(), lengths.const_data_ptr<int32_t>(), lengths.numel(), q.size(0));
  const Groups groups = group(kv_head_of.const_data_ptr<int32_t>(), heads, kv_heads);
  Tensor out = at::empty(q.sizes(), q.options());
  const Chunks job = {q.const_data_ptr(), q.stride(0), q.stride(1), pool, table.const_data_ptr<int32_t>(),
                      table.stride(0), tiles.chunk.data(), tiles.row.data(), tiles.stop.data(),
                      static_cast<int64_t>(tiles.row.size()), tiles.ahead.data(), groups.heads.data(),
                      groups.start.data(), kv_heads, heads, q.size(2), window, static_cast<float>(scale),
                      out.mutable_data_ptr()};
  if (job.num_tiles > 0) (half ? chosen->attend_many_bf16 : chosen->attend_many_f32)(job);
  return out;
}

// ---- the small ones -------------------------------------------------------------------------------------------------

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual) {
  const bool half = is_bf16(x, "x");
  check_rows(x, "x");
  check_dense(weight, x.scalar_type(), "weight");
  TORCH_CHECK(weight.numel() == x.size(-1), "weight has ", weight.numel(), " elements, x ", x.sizes());
  if (residual) {
    check_dense(*residual, x.scalar_type(), "residual");
    TORCH_CHECK(residual->sizes() == x.sizes(), "residual is ", residual->sizes(), ", x ", x.sizes());
  }
  const Tensor rows = as_rows(x);
  Tensor out = at::empty(x.sizes(), x.options());
  const Norm job = {rows.const_data_ptr(), rows.stride(0), weight.const_data_ptr(),
                    residual ? residual->mutable_data_ptr() : nullptr, x.size(-1), out.mutable_data_ptr(), rows.size(0),
                    x.size(-1), static_cast<float>(eps)};
  (half ? chosen->norm_bf16 : chosen->norm_f32)(job);
  return out;
}

Tensor silu_mul(const Tensor& gate_up) {
  const bool half = is_bf16(gate_up, "gate_up");
  check_rows(gate_up, "gate_up");
  TORCH_CHECK(gate_up.size(-1) % 2 == 0, "gate_up's last dim is odd: ", gate_up.sizes());
  const Tensor rows = as_rows(gate_up);
  Tensor out = with_last(gate_up, gate_up.size(-1) / 2);
  const Silu job = {rows.const_data_ptr(), rows.stride(0), out.mutable_data_ptr(), rows.size(0), rows.size(1) / 2};
  (half ? chosen->silu_bf16 : chosen->silu_f32)(job);
  return out;
}

void check_places(const Tensor& pages, const Tensor& offsets, int64_t tokens, const Tensor& pool) {
  check_dense(pages, at::kLong, "pages");
  check_dense(offsets, at::kLong, "offsets");
  TORCH_CHECK(pages.numel() == tokens && offsets.numel() == tokens, tokens, " tokens, ", pages.numel(), " pages, ",
              offsets.numel(), " offsets");
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t page = pages.const_data_ptr<int64_t>()[t], offset = offsets.const_data_ptr<int64_t>()[t];
    TORCH_CHECK(page >= 0 && page < pool.size(0) && offset >= 0 && offset < pool.size(2), "token ", t, " goes to page ",
                page, " offset ", offset, " of a pool of ", pool.sizes());
  }
}

void rope_and_write(const std::tuple<Tensor, Tensor, Tensor>& qkv, const std::tuple<Tensor, Tensor>& angles,
                    const std::tuple<Tensor, Tensor>& pools, const std::tuple<Tensor, Tensor>& places) {
  const auto& [q, k, v] = qkv;
  const auto& [cos, sin] = angles;
  const auto& [k_pool, v_pool] = pools;
  const auto& [pages, offsets] = places;
  const bool half = is_bf16(q, "q");
  for (const Tensor* x : {&q, &k, &v, &k_pool, &v_pool}) {
    check_like(*x, q, "q, k, v or pool");
    check_rows(*x, "q, k, v or pool");
  }
  check_dense(cos, at::kFloat, "cos");
  check_dense(sin, at::kFloat, "sin");
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && k_pool.dim() == 4 && v_pool.dim() == 4, "wrong ranks");
  const int64_t tokens = q.size(0);
  TORCH_CHECK(k.size(0) == tokens && v.size(0) == tokens && k.size(2) == q.size(2) && v.size(1) == k.size(1) &&
                  k_pool.size(1) == k.size(1) && v_pool.size(1) == k.size(1) && k_pool.size(3) == k.size(2) &&
                  v_pool.size(3) == v.size(2) && k_pool.size(0) == v_pool.size(0) && k_pool.size(2) == v_pool.size(2),
              "q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes(), ", pools ", k_pool.sizes(), " and ",
              v_pool.sizes(), " do not fit");
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) == tokens && 2 * cos.size(1) <= q.size(2),
              "cos ", cos.sizes(), ", sin ", sin.sizes(), " for q ", q.sizes());
  check_places(pages, offsets, tokens, k_pool);
  const Rope job = {q.mutable_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), q.stride(0), q.stride(1), k.stride(0),
                    k.stride(1), v.stride(0), v.stride(1), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(),
                    k_pool.mutable_data_ptr(), v_pool.mutable_data_ptr(), k_pool.stride(0), k_pool.stride(1),
                    k_pool.stride(2), v_pool.stride(0), v_pool.stride(1), v_pool.stride(2),
                    pages.const_data_ptr<int64_t>(), offsets.const_data_ptr<int64_t>(), tokens, q.size(1), k.size(1),
                    k.size(2), v.size(2), cos.size(1)};
  (half ? chosen->rope_bf16 : chosen->rope_f32)(job);
}

// ---- choosing -------------------------------------------------------------------------------------------------------

Tensor argmax(const Tensor& x) {
  const bool half = is_bf16(x, "x");
  check_rows(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "x must be rows, is ", x.sizes());
  Tensor ids = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  const Choice job = {x.const_data_ptr(), x.stride(0), x.size(0), x.size(1), nullptr, nullptr, nullptr,
                      ids.mutable_data_ptr<int64_t>()};
  (half ? chosen->argmax_bf16 : chosen->argmax_f32)(job);
  return ids;
}

Tensor race(const Tensor& x, const Tensor& floor, const Tensor& seed, const Tensor& position) {
  TORCH_CHECK(!is_bf16(x, "logits"), "logits must be float32");
  check_rows(x, "logits");
  check_dense(floor, at::kFloat, "floor");
  check_dense(seed, at::kLong, "seed");
  check_dense(position, at::kLong, "position");
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0 && x.size(1) < (1ll << 31), "logits must be rows, are ", x.sizes());
  const int64_t rows = x.size(0);
  TORCH_CHECK(floor.numel() == rows && seed.numel() == rows && position.numel() == rows, rows, " rows, floors ",
              floor.sizes(), ", seeds ", seed.sizes(), ", positions ", position.sizes());
  Tensor ids = at::empty({rows}, seed.options());
  chosen->race({x.const_data_ptr(), x.stride(0), rows, x.size(1), floor.const_data_ptr<float>(),
                seed.const_data_ptr<int64_t>(), position.const_data_ptr<int64_t>(), ids.mutable_data_ptr<int64_t>()});
  return ids;
}

// ---- collectives ----------------------------------------------------------------------------------------------------

void check_signals() {  // so that Ctrl-C and SIGTERM are heard while a rank waits for another
  pybind11::gil_scoped_acquire hold;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

void check_whole(const Tensor& x) {
  TORCH_CHECK(x.device().is_cpu() && x.is_contiguous(), "collectives take contiguous CPU tensors, got strides ",
              x.strides(), " on ", x.device());
}

void all_reduce(ShmGroup& group, const Tensor& x) {
  check_whole(x);
  group.all_reduce(x.mutable_data_ptr(), x.numel(), x.element_size(),
                   is_bf16(x, "x") ? chosen->add_up_bf16 : chosen->add_up_f32, check_signals);
}

std::optional<Tensor> gather_to_first(ShmGroup& group, const Tensor& x) {
  check_whole(x);
  std::optional<Tensor> gathered;
  if (group.rank() == 0) {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.insert(sizes.begin(), group.size());
    gathered = at::empty(sizes, x.options());
  }
  group.gather(x.const_data_ptr(), x.nbytes(), gathered ? gathered->mutable_data_ptr() : nullptr, check_signals);
  return gathered;
}

void broadcast(ShmGroup& group, const Tensor& x) {
  check_whole(x);
  group.broadcast(x.mutable_data_ptr(), x.nbytes(), check_signals);
}

}  // namespace
}  // namespace pd

PYBIND11_MODULE(_cpu_ops, m) {
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("available", &pd::available);
  m.def("use", &pd::use);
  m.def("pack", &pd::pack, release());
  m.def("linear", &pd::linear, release());
  m.def("paged_decode", &pd::paged_decode, release());
  m.def("paged_prefill", &pd::paged_prefill, release());
  m.def("rms_norm", &pd::rms_norm, release());
  m.def("silu_mul", &pd::silu_mul, release());
  m.def("rope_and_write", &pd::rope_and_write, release());
  m.def("argmax", &pd::argmax, release());
  m.def("race", &pd::race, release());
  pybind11::register_exception<pd::GroupBroken>(m, "GroupBroken");
  m.def("make_region", &pd::make_region);
  pybind11::class_<pd::ShmGroup>(m, "ShmGroup")
      .def(pybind11::init<int, int, int, int64_t, double>())
      .def("all_reduce", &pd::all_reduce, release())
      .def("gather_to_first", &pd::gather_to_first, release())
      .def("broadcast", &pd::broadcast, release())
      .def("close", &pd::ShmGroup::close, release());
}

// The backend "convoke" of torch.distributed: a c10d::Backend on the table of functions of libconvoke.
//
// It translates tensors and options to calls, and results to works and futures. It contains no Python, so one build
// serves every Python version. docs/internals/pytorch.md describes it.

#include "call.hpp"
#include "pool.hpp"
#include "work.hpp"

#include <torch/library.h>

namespace {

// The name of an operation in profiles. Scripts that name gloo find it there.
#define TITLE(operation) (is_gloo_ ? "gloo:" operation : "convoke:" operation)

class ConvokeBackend final : public c10d::Backend {
  public:
    using Options = c10d::Backend::Options;

    ConvokeBackend(cvk_group* group, Milliseconds timeout, bool is_gloo)
        : Backend(static_cast<int>(api->group_rank(group)), static_cast<int>(api->group_size(group))),
          group_(group), is_gloo_(is_gloo),
          options_(c10::make_intrusive<Options>(is_gloo ? "gloo" : "convoke", timeout)) {
        init();
    }
    ~ConvokeBackend() override { release_group(); }

    const std::string getBackendName() const override { return options_->backend; }
    c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() OVERRIDE_SINCE_9 { return options_; }
    void setTimeout(Milliseconds timeout) OVERRIDE_SINCE_9 { options_->timeout = timeout; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return seq_; }
    bool supportsCoalescing() const override { return true; }
    bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
    Tensor allocateTensor(long size, at::TensorOptions options) override {
        {
            std::lock_guard<std::mutex> lock(pool_mutex_);
            if (!pool_) pool_ = std::make_shared<Pool>(group_, size_);
        }
        return pool_->allocate(size, options);
    }

    void abort() override {
        hooks_->abort.call();
        (void)api->group_abort(group_, "the program called abort");
    }
    void shutdown() override { (void)api->group_destroy(group_); }
    c10d::ErrorType getError() override {
        const char* failure = api->group_failure_json(group_);
        if (!failure) return c10d::ErrorType::SUCCESS;
        return std::strstr(failure, "\"code\":\"timeout\"") ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
    }
#ifdef C10D_BACKEND_HAS_HOOKS
    bool supportsAbortHooks() const OVERRIDE_SINCE_15 { return true; }
    void registerAbortHook(int64_t id, c10d::AbortHook hook) override { hooks_->abort.add(id, std::move(hook)); }
    void unregisterAbortHook(int64_t id) override { hooks_->abort.remove(id); }
#endif
#if TORCH_SINCE(15)
    bool supportsCompletionHooks() const override { return true; }
    void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
        hooks_->completion.add(id, [hook = std::move(hook)](uint64_t key, float ms) { hook({key, ms}); });
    }
    void unregisterCompletionHook(int64_t id) override { hooks_->completion.remove(id); }
#endif
#if TORCH_SINCE(9)
    // All ranks of the group call this. Those of `ranks` get the new group, and other ranks null.
    bool supportsSplitting() const override { return true; }
    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<c10d::Backend::Options>& opts) override {
        const auto place = std::find(ranks.begin(), ranks.end(), rank_);
        const int64_t color = place == ranks.end() ? -1 : *std::min_element(ranks.begin(), ranks.end());
        cvk_group* group = nullptr;
        check(api->group_split(group_, color, place - ranks.begin(), &group));
        if (!group) return nullptr;
        return c10::make_intrusive<ConvokeBackend>(group, limit(opts->timeout), is_gloo_);
    }
#endif
    std::string failure() const {
        const char* failure = api->group_failure_json(group_);
        return failure ? failure : "";
    }

    // Works of the operations between both calls are waited for by one work.
    void startCoalescing() override {
        TORCH_CHECK(!is_coalescing_, "startCoalescing was called twice");
        is_coalescing_ = true;
    }
    WorkPtr endCoalescing() override {
        is_coalescing_ = false;
        return c10::make_intrusive<JointWork>(OpType::COALESCED, std::move(coalesced_), Tensors());
    }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
        Target target(only(tensors), opts.rootRank == rank_);
        Call call(CVK_KIND_BROADCAST, opts.rootRank);
        call.recv(target.memory);
        if (opts.rootRank != rank_) call.then([target] { target.deliver(); });
        return carry_out(OpType::BROADCAST, TITLE("broadcast"), call, tensors, tensors, opts);
    }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
        return reduce_all(only(tensors), tensors, opts, OpType::ALLREDUCE, TITLE("all_reduce"));
    }

    // Gathers the indices and values of all ranks, and adds them. It waits, also if the options do not ask for it.
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        TORCH_CHECK(tensors.size() == 1 && tensors[0].is_sparse() && tensors[0].device().is_cpu(),
                    "allreduce_sparse takes one sparse CPU tensor");
        TORCH_CHECK(opts.reduceOp == c10d::ReduceOp::SUM, "sparse tensors can only be added");
        seq_++;
        at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor input = tensors[0].coalesce();
        const int64_t sparse_dim = input.sparse_dim(), entries = input._nnz();
        const Tensor mine = at::full({1}, entries, at::kLong), counts = at::empty({size_}, at::kLong);
        run_now(Call(CVK_KIND_ALL_GATHER).send(mine).recv(counts), opts.timeout);
        const auto* count = counts.const_data_ptr<int64_t>();
        const int64_t all = counts.sum().item<int64_t>();
        const Tensor values = input._values().contiguous(), indices = input._indices().t().contiguous();
        auto shape = values.sizes().vec();
        shape[0] = all;
        const int64_t row = entries > 0 ? values.numel() / entries : c10::multiply_integers(shape.begin() + 1, shape.end());
        const Tensor all_values = at::empty(shape, values.options()), all_indices = at::empty({all, sparse_dim}, at::kLong);
        Call of_values(CVK_KIND_ALL_GATHER_V), of_indices(CVK_KIND_ALL_GATHER_V);
        const auto times = element_type(values).times;
        for (int rank = 0; rank < size_; rank++) {
            of_values.recv_counts.push_back(static_cast<size_t>(count[rank] * row * times));
            of_indices.recv_counts.push_back(static_cast<size_t>(count[rank] * sparse_dim));
        }
        run_now(of_values.send(values).recv(all_values), opts.timeout);
        run_now(of_indices.send(indices).recv(all_indices), opts.timeout);
        tensors[0].copy_(at::sparse_coo_tensor(all_indices.t(), all_values, input.sizes()).coalesce());
        auto work = c10::make_intrusive<ConvokeWork>(OpType::_ALLREDUCE_SPARSE, TITLE("all_reduce"), tensors,
                                                     tensors, seq_, 0);
        work->end(nullptr, -1);
        return work;
    }

    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
        check_equal_types(tensors);
        auto pieces = std::make_shared<Pieces>(tensors, true);
        if (tensors.empty()) return nothing(OpType::ALLREDUCE_COALESCED);
        Call call(CVK_KIND_ALL_REDUCE);
        call.recv(pieces->memory, total(tensors)).by(opts.reduceOp, tensors[0]).then([pieces] { pieces->deliver(); });
        return carry_out(OpType::ALLREDUCE_COALESCED, TITLE("all_reduce_coalesced"), call, tensors, tensors, opts);
    }

    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
        // In place on the root; the tensors of other ranks must not change.
        const Tensor& tensor = only(tensors);
        const bool is_root = opts.rootRank == rank_;
        Call call(CVK_KIND_REDUCE, opts.rootRank);
        call.by(opts.reduceOp, tensor);
        if (is_root) {
            Target target(tensor);
            auto input = at::empty_like(target.memory);
            input.copy_(target.memory);
            call.send(input).recv(target.memory).then([target] { target.deliver(); });
        } else {
            call.send(in_one_piece(tensor));
        }
        return carry_out(OpType::REDUCE, TITLE("reduce"), call, tensors, tensors, opts);
    }

    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
        const Tensor& input = only(inputs);
        TORCH_CHECK(outputs.size() == 1, "convoke gathers one list of tensors, and got ", outputs.size());
        check_list(outputs[0], input, "output");
        return gather_all(std::make_shared<Pieces>(outputs[0], false), input, input.numel(), OpType::ALLGATHER, TITLE("all_gather"),
                          inputs, outputs, opts);
    }

    WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
        check_tensor(input);
        check_size(output, input, size_, "output");
        return gather_all(std::make_shared<Pieces>(Tensors{output}, false), input, input.numel(), OpType::_ALLGATHER_BASE,
                          TITLE("_all_gather_base"), {input}, Tensors{output}, opts);
    }

    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override {
        // outputs[rank][i] gets inputs[i] of that rank.
        TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "all_gather_coalesced needs a list for each of ", size_,
                    " ranks, and got ", outputs.size());
        Tensors all;
        for (const auto& list : outputs) {
            TORCH_CHECK(list.size() == inputs.size(), "all_gather_coalesced got ", inputs.size(), " inputs and a list of ",
                        list.size(), " outputs");
            for (size_t i = 0; i < list.size(); i++) {
                TORCH_CHECK(list[i].numel() == inputs[i].numel() && list[i].scalar_type() == inputs[i].scalar_type(),
                            "output ", i, " of all_gather_coalesced has another size or type than input ", i);
                all.push_back(list[i]);
            }
        }
        if (inputs.empty()) return nothing(OpType::ALLGATHER_COALESCED);
        return gather_all(std::make_shared<Pieces>(all, false), Pieces(inputs, true).memory, total(inputs),
                          OpType::ALLGATHER_COALESCED, TITLE("all_gather"), inputs, outputs, opts);
    }

    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
        TORCH_CHECK(outputs.size() == inputs.size(), "got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
        std::vector<WorkPtr> works;
        for (size_t i = 0; i < inputs.size(); i++)
            works.push_back(_allgather_base(outputs[i], inputs[i], asynchronous(opts)));
        return joined(COALESCED_AS(ALLGATHER_INTO_TENSOR_COALESCED), std::move(works), outputs, is_async(opts));
    }

    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
        const Tensor& input = only(inputs);
        Call call(CVK_KIND_GATHER, opts.rootRank);
        call.send(in_one_piece(input));
        if (opts.rootRank == rank_) {
            TORCH_CHECK(outputs.size() == 1, "the root of gather needs one list of tensors, and got ", outputs.size());
            check_list(outputs[0], input, "output");
            auto pieces = std::make_shared<Pieces>(outputs[0], false);
            call.recv(pieces->memory, size_ * input.numel()).then([pieces] { pieces->deliver(); });
        } else {
            TORCH_CHECK(outputs.empty() || outputs[0].empty(), "only the root of gather takes outputs");
        }
        return carry_out(OpType::GATHER, TITLE("gather"), call, inputs, outputs, opts);
    }

    WorkPtr gather_into_tensor(Tensor& output, Tensor& input, const c10d::GatherOptions& opts) OVERRIDE_SINCE_14 {
        check_tensor(input);
        Call call(CVK_KIND_GATHER, opts.rootRank);
        call.send(in_one_piece(input));
        if (opts.rootRank == rank_) {
            check_size(output, input, size_, "output");
            Target target(output, false);
            call.recv(target.memory).then([target] { target.deliver(); });
        }
        return carry_out(OpType::GATHER, TITLE("gather"), call, {input}, Tensors{output}, opts);
    }

    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
        const Tensor& output = only(outputs);
        Target target(output, false);
        Call call(CVK_KIND_SCATTER, opts.rootRank);
        call.recv(target.memory).then([target] { target.deliver(); });
        if (opts.rootRank == rank_) {
            TORCH_CHECK(inputs.size() == 1, "the root of scatter needs one list of tensors, and got ", inputs.size());
            check_list(inputs[0], output, "input");
            call.send(Pieces(inputs[0], true).memory, size_ * output.numel());
        } else {
            TORCH_CHECK(inputs.empty() || inputs[0].empty(), "only the root of scatter takes inputs");
        }
        return carry_out(OpType::SCATTER, TITLE("scatter"), call, inputs.empty() ? Tensors() : inputs[0], outputs, opts);
    }

    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
        const Tensor& output = only(outputs);
        TORCH_CHECK(inputs.size() == 1, "convoke scatters one list of tensors, and got ", inputs.size());
        check_list(inputs[0], output, "input");
        return scatter_sum(output, Pieces(inputs[0], true).memory, OpType::REDUCE_SCATTER, TITLE("reduce_scatter"),
                           inputs[0], opts);
    }

    WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
        check_tensor(output);
        check_size(input, output, size_, "input");
        return scatter_sum(output, in_one_piece(input), OpType::_REDUCE_SCATTER_BASE, TITLE("_reduce_scatter_base"),
                           {input}, opts);
    }

    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
        TORCH_CHECK(outputs.size() == inputs.size(), "got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
        std::vector<WorkPtr> works;
        for (size_t i = 0; i < inputs.size(); i++)
            works.push_back(_reduce_scatter_base(outputs[i], inputs[i], asynchronous(opts)));
        return joined(COALESCED_AS(REDUCE_SCATTER_TENSOR_COALESCED), std::move(works), outputs, is_async(opts));
    }

    WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
        check_equal_types({output, input});
        Target target(output, false);
        Call call(output_splits.empty() && input_splits.empty() ? CVK_KIND_ALL_TO_ALL : CVK_KIND_ALL_TO_ALL_V);
        call.send(in_one_piece(input)).recv(target.memory).then([target] { target.deliver(); });
        if (call.raw.kind == CVK_KIND_ALL_TO_ALL) {
            TORCH_CHECK(input.numel() == output.numel(), "all_to_all without split sizes needs tensors of one size, and got ",
                        input.numel(), " and ", output.numel(), " elements");
        } else {
            const auto times = element_type(input).times;
            call.send_counts = scaled(split_counts(input, input_splits, "input"), times);
            call.recv_counts = scaled(split_counts(output, output_splits, "output"), times);
        }
        return carry_out(OpType::ALLTOALL_BASE, TITLE("all_to_all"), call, {input}, Tensors{output}, opts);
    }

    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
        TORCH_CHECK(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
                    "all_to_all needs lists of ", size_, " tensors, and got ", inputs.size(), " inputs and ", outputs.size(),
                    " outputs");
        Pieces from(inputs, true);
        auto to = std::make_shared<Pieces>(outputs, false);
        TORCH_CHECK(inputs[0].scalar_type() == outputs[0].scalar_type(), "inputs and outputs must have one type");
        Call call(CVK_KIND_ALL_TO_ALL_V);
        call.send(from.memory, total(inputs)).recv(to->memory, total(outputs)).then([to] { to->deliver(); });
        const auto times = element_type(inputs[0]).times;
        for (const auto& tensor : inputs) call.send_counts.push_back(static_cast<size_t>(tensor.numel() * times));
        for (const auto& tensor : outputs) call.recv_counts.push_back(static_cast<size_t>(tensor.numel() * times));
        return carry_out(OpType::ALLTOALL, TITLE("all_to_all"), call, inputs, outputs, opts);
    }

    WorkPtr send(Tensors& tensors, int to, int tag) override {
        Call call(CVK_KIND_SEND, to, tag);
        call.send(in_one_piece(only(tensors)));
        return begin(OpType::SEND, TITLE("send"), call, tensors, tensors, options_->timeout);
    }
    WorkPtr recv(Tensors& tensors, int from, int tag) override {
        return receive(tensors, from, tag, OpType::RECV, TITLE("recv"));
    }
    WorkPtr recvAnysource(Tensors& tensors, int tag) override {
        return receive(tensors, CVK_ANY_RANK, tag, OpType::RECVANYSOURCE, TITLE("recvAnySource"));
    }

    WorkPtr barrier(const c10d::BarrierOptions& opts) override {
        Call call(CVK_KIND_BARRIER);
        return carry_out(OpType::BARRIER, TITLE("barrier"), call, {}, {}, opts);
    }

    void monitoredBarrier(const c10d::BarrierOptions& opts, bool names_all) override {
        finished().release();
        const bool is_unset = opts.timeout == c10d::kUnsetTimeout;
        const auto timeout = is_unset ? options_->timeout : opts.timeout;
        if (timeout.count() <= 0) {
            std::rethrow_exception(error_of(c10::str("Rank ", rank_, " timed out in monitoredBarrier: its time limit is ",
                                                     timeout.count(), " ms")));
        }
        const cvk_status status = api->monitored_barrier(group_, static_cast<uint64_t>(timeout.count()));
        if (status != CVK_STATUS_TIMEOUT) return check(status);
        // Scripts know the texts of gloo. All ranks get the missing ranks.
        const std::string ranks = missing_ranks(names_all);
        std::string text = rank_ == 0
            ? c10::str(names_all ? "Ranks " : "Rank ", ranks, " failed to pass monitoredBarrier in ", timeout.count(), " ms")
            : c10::str("Rank ", rank_, " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                       "from rank 0");
        std::rethrow_exception(error_of(c10::str(text, ": ", api->error_message())));
    }

  private:
    // The ranks for which the last failed call waited, or the first of them.
    static std::string missing_ranks(bool all) {
        const std::string json = api->error_json(), key = "\"missing\":[";
        const auto start = json.find(key);
        if (start == std::string::npos) return "?";
        const auto begin = start + key.size();
        std::string ranks;
        for (const char c : json.substr(begin, json.find(']', begin) - begin)) {
            if (c == ',' && !all) break;
            ranks += c == ',' ? std::string(", ") : std::string(1, c);
        }
        return ranks;
    }

    void release_group() {
        finished().release();
        api->group_free(group_);
    }

    Milliseconds limit(Milliseconds timeout) const {
        return timeout == c10d::kUnsetTimeout || timeout.count() <= 0 ? options_->timeout : timeout;
    }

    // torch 2.7 does not tell whether the program waits at once.
    template <typename O>
    static bool is_async(const O& opts) {
        if constexpr (requires { opts.asyncOp; }) return opts.asyncOp;
        return true;
    }

    template <typename O>
    static O asynchronous(O opts) {
        if constexpr (requires { opts.asyncOp; }) opts.asyncOp = true;
        return opts;
    }

    WorkPtr nothing(OpType type) {
        return c10::make_intrusive<ConvokeWork>(type, nullptr, Tensors(), Results(), seq_, 0);
    }

    WorkPtr joined(OpType type, std::vector<WorkPtr> works, Tensors results, bool is_async) {
        auto joint = c10::make_intrusive<JointWork>(type, std::move(works), std::move(results));
        if (!is_async) joint->wait(kNoTimeout);
        return joint;
    }

    static int64_t total(const Tensors& tensors) {
        int64_t total = 0;
        for (const auto& tensor : tensors) total += tensor.numel();
        return total;
    }

    void check_list(const Tensors& list, const Tensor& one, const char* what) const {
        TORCH_CHECK(list.size() == static_cast<size_t>(size_), "there are ", size_, " ranks, and the list has ", list.size(), " ",
                    what, " tensors");
        for (const auto& tensor : list) {
            check_tensor(tensor);
            TORCH_CHECK(tensor.numel() == one.numel() && tensor.scalar_type() == one.scalar_type(), "an ", what,
                        " tensor has ", tensor.numel(), " elements of ", tensor.scalar_type(), ", and this rank's other tensor ",
                        one.numel(), " of ", one.scalar_type());
        }
    }

    void check_size(const Tensor& large, const Tensor& small, int times, const char* what) const {
        check_tensor(large);
        TORCH_CHECK(large.scalar_type() == small.scalar_type(), "input and output must have one type, and have ",
                    large.scalar_type(), " and ", small.scalar_type());
        TORCH_CHECK(large.numel() == small.numel() * times, "the ", what, " tensor has ", large.numel(), " elements; ", times,
                    " ranks with ", small.numel(), " elements each need ", small.numel() * times);
    }

    // Elements for each rank, of split sizes along the first dimension; equal ones if there are none.
    std::vector<int64_t> split_counts(const Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const {
        const int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0), row = length == 0 ? 1 : tensor.numel() / length;
        if (splits.empty()) {
            TORCH_CHECK(length % size_ == 0, "the ", what, " tensor has length ", length, ", which ", size_,
                        " ranks do not divide: give split sizes");
            return std::vector<int64_t>(static_cast<size_t>(size_), length / size_ * row);
        }
        TORCH_CHECK(splits.size() == static_cast<size_t>(size_), "there are ", size_, " ranks, and ", splits.size(), " ", what,
                    " split sizes");
        int64_t sum = 0;
        std::vector<int64_t> counts;
        for (int64_t split : splits) {
            sum += split;
            counts.push_back(split * row);
        }
        TORCH_CHECK(sum == length, "the ", what, " split sizes add up to ", sum, ", and the tensor has length ", length);
        return counts;
    }

    template <typename O>
    WorkPtr reduce_all(const Tensor& tensor, const Tensors& inputs, const O& opts, OpType type, const char* title) {
        Target target(tensor);
        Call call(CVK_KIND_ALL_REDUCE);
        call.recv(target.memory).by(opts.reduceOp, tensor);
        if (target.is_copied) call.then([target] { target.deliver(); });
        return carry_out(type, title, call, inputs, inputs, opts);
    }

    template <typename O>
    WorkPtr gather_all(std::shared_ptr<Pieces> to, const Tensor& input, int64_t count, OpType type, const char* title,
                       const Tensors& inputs, Results outputs, const O& opts) {
        Call call(CVK_KIND_ALL_GATHER);
        const Tensor own = in_one_piece(input);
        // FSDP passes a part of the output, which is then in its place already.
        const char* place = static_cast<const char*>(to->memory.const_data_ptr()) + rank_ * count * own.element_size();
        if (own.const_data_ptr() != place) call.send(own, count);
        call.recv(to->memory, size_ * count);
        if (to->is_copied) call.then([to] { to->deliver(); });
        return carry_out(type, title, call, inputs, std::move(outputs), opts);
    }

    WorkPtr scatter_sum(const Tensor& output, const Tensor& input, OpType type, const char* title, const Tensors& inputs,
                        const c10d::ReduceScatterOptions& opts) {
        Target target(output, false);
        Call call(CVK_KIND_REDUCE_SCATTER);
        call.send(input, size_ * output.numel()).recv(target.memory).by(opts.reduceOp, output);
        if (target.is_copied) call.then([target] { target.deliver(); });
        return carry_out(type, title, call, inputs, Tensors{output}, opts);
    }

    WorkPtr receive(Tensors& tensors, int64_t from, int tag, OpType type, const char* title) {
        Target target(only(tensors));
        Call call(CVK_KIND_RECV, from, tag);
        call.recv(target.memory);
        if (target.is_copied) call.then([target] { target.deliver(); });
        return begin(type, title, call, tensors, tensors, options_->timeout);
    }

    // Carries out a call without a work.
    void run_now(Call& call, Milliseconds timeout) {
        set_pointers(call, limit(timeout));
        const cvk_status status = api->run(group_, &call.raw, 1, nullptr);
        if (status == CVK_STATUS_OK) return;
        const auto error = last_error(status);
        hooks_->failed();
        std::rethrow_exception(error);
    }

    // Waits for the call if the options say so.
    template <typename O>
    WorkPtr carry_out(OpType type, const char* title, Call& call, const Tensors& inputs, Results results,
                      const O& opts) {
        const auto timeout = limit(opts.timeout);
        seq_++;
        if (is_async(opts) || is_coalescing_) {
            return begin(type, title, call, inputs, std::move(results), timeout);
        }
        finished().release();
        const auto start = hooks_->start();
        auto work = c10::make_intrusive<ConvokeWork>(type, title, inputs, std::move(results), seq_, start.key);
        try {
            run_now(call, timeout);
            if (call.deliver) call.deliver();
        } catch (...) {
            work->end(std::current_exception(), -1);
            throw;
        }
        work->end(nullptr, -1);
        hooks_->done(start);
        return work;
    }

    WorkPtr begin(OpType type, const char* title, Call& call, const Tensors& inputs, Results results,
                  Milliseconds timeout) {
        finished().release();
        set_pointers(call, timeout);
        auto operation = std::make_shared<Operation>();
        operation->hooks = hooks_;
        operation->start = hooks_->start();
        auto work = c10::make_intrusive<ConvokeWork>(type, title, inputs, std::move(results), seq_, operation->start.key);
        operation->tensors = std::move(call.tensors);
        operation->deliver = std::move(call.deliver);
        work->begin_with(operation);
        auto* context = new OperationPtr(operation);
        call.raw.on_complete = on_complete;
        call.raw.on_complete_context = context;
        const cvk_status status = api->start(group_, &call.raw, &operation->handle);
        if (status != CVK_STATUS_OK) {
            delete context;
            auto error = last_error(status);
            hooks_->failed();
            operation->is_done = true;
            work->end(error, -1);
            std::rethrow_exception(error);
        }
        bool is_finished;
        {
            std::lock_guard<std::mutex> lock(operation->mutex);
            operation->is_begun = true;
            is_finished = operation->is_finished;
        }
        if (is_finished) complete(operation);
        if (is_coalescing_) coalesced_.push_back(work);
        return work;
    }

    void set_pointers(Call& call, Milliseconds timeout) {
        call.separate();
        if (!call.send_counts.empty()) call.raw.send_counts = call.send_counts.data();
        if (!call.recv_counts.empty()) call.raw.recv_counts = call.recv_counts.data();
        call.raw.timeout_ms = static_cast<uint64_t>(timeout.count());
    }

    cvk_group* const group_;
    const bool is_gloo_;  // the backend has taken the place of gloo
    c10::intrusive_ptr<Options> options_;
    const std::shared_ptr<GroupHooks> hooks_ = std::make_shared<GroupHooks>();
    std::atomic<uint64_t> seq_{0};
    bool is_coalescing_ = false;
    std::vector<WorkPtr> coalesced_;
    std::mutex pool_mutex_;
    std::shared_ptr<Pool> pool_;
};

// ---------------------------------------------------------------------------------------------------------------
// Operators for Python

// Makes the table of functions known. The address is that of a `cvk_api_table`.
void set_table(int64_t address) { api = reinterpret_cast<const cvk_api_table*>(address); }

// Makes the backend the one of CPU tensors of `group`.
void use(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::intrusive_ptr<ConvokeBackend> backend) {
    // Also in the place of gloo: torch casts a backend of the type GLOO to its own class.
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, std::move(backend));
}

// Joins the other ranks at a store.
void attach(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name, const std::string& store,
            int64_t rank, int64_t size, int64_t timeout_ms, bool is_gloo) {
    cvk_init_options options{};
    options.size = sizeof options;
    options.store = store.empty() ? "localhost:1" : store.c_str();  // a group of one rank asks no store
    options.rank = static_cast<size_t>(rank);
    options.world_size = static_cast<size_t>(size);
    options.name = name.c_str();
    options.timeout_ms = options.init_timeout_ms = static_cast<uint64_t>(timeout_ms);
    cvk_group* joined = nullptr;
    check(api->init(&options, &joined));
    use(group, c10::make_intrusive<ConvokeBackend>(joined, Milliseconds(timeout_ms), is_gloo));
}

ConvokeBackend* convoke_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    // A group without CPU tensors has no such backend, which is an error of `getBackend`.
    return dynamic_cast<ConvokeBackend*>(group->getBackend(c10::DeviceType::CPU).get());
}

// The error that ended a group, as JSON; empty if none did.
std::string failure(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    auto* backend = convoke_backend(group);
    TORCH_CHECK(backend, "the group's backend for CPU tensors is ",
                group->getBackend(c10::DeviceType::CPU)->getBackendName(), " and not convoke");
    return backend->failure();
}

// Ends the threads that complete futures. Called before the interpreter ends.
void stop() {
    future_threads().stop();
    finished().release();
}

}  // namespace

TORCH_LIBRARY(convoke, library) {
    constexpr auto key = c10::DispatchKey::CompositeExplicitAutograd;
    library.def("set_table(int address) -> ()");
    library.impl("set_table", key, TORCH_FN(set_table));
    library.def("attach(__torch__.torch.classes.c10d.ProcessGroup group, str name, str store, int rank, int size, int timeout_ms, bool is_gloo) -> ()");
    library.impl("attach", key, TORCH_FN(attach));
    library.def("failure(__torch__.torch.classes.c10d.ProcessGroup group) -> str");
    library.impl("failure", key, TORCH_FN(failure));
    library.def("stop() -> ()");
    library.impl("stop", key, TORCH_FN(stop));
}

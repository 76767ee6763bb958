// Every rank adds up vectors with all others while it computes, with objects that free what they hold.
//
//   c++ -std=c++20 overlap.cpp $(pkg-config --cflags --libs convoke) -o overlap
//   convoke --standalone --nproc-per-node=4 ./overlap
#include <convoke.h>

#include <cstdio>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

// An error with the rank and host at fault.
void check(cvk_status status) {
    if (status != CVK_STATUS_OK) throw std::runtime_error(cvk_error_message());
}

struct Free {
    void operator()(cvk_group* group) const { cvk_group_free(group); }
    void operator()(cvk_work* work) const { cvk_work_free(work); }
};
using Group = std::unique_ptr<cvk_group, Free>;
using Work = std::unique_ptr<cvk_work, Free>;

Group world() {
    cvk_group* group = nullptr;
    check(cvk_init(nullptr, &group));
    return Group(group);
}

// Begins to add up `values` of all ranks. They must stay where they are until the work is done.
Work add_up(const Group& group, std::vector<double>& values) {
    cvk_call call{};
    call.size = sizeof call;
    call.kind = CVK_KIND_ALL_REDUCE;
    call.dtype = CVK_TYPE_F64;
    call.reduce_op = CVK_OP_SUM;
    call.recv = values.data();
    call.recv_count = values.size();
    cvk_work* work = nullptr;
    check(cvk_start(group.get(), &call, &work));
    return Work(work);
}

int main() try {
    const Group group = world();
    const auto rank = static_cast<double>(cvk_group_rank(group.get()));
    std::vector<double> first(1000, rank), second(1000);
    const Work sum = add_up(group, first);
    std::iota(second.begin(), second.end(), rank);  // computed while the first sum is under way
    const Work other = add_up(group, second);
    for (const Work* work : {&sum, &other}) check(cvk_work_wait(work->get(), CVK_FOREVER, nullptr));
    if (rank == 0) std::printf("%g and %g\n", first[0], second[999]);
} catch (const std::exception& error) {
    std::fprintf(stderr, "overlap: %s\n", error.what());
    return 1;
}

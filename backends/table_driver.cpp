// Runs kernels that Inductor generated for one tensor over a table of tensors, in one parallel region.
//
// The text before this file is generated (see table_source.py). It includes the headers, holds the kernels, and defines
//   Scalar            the type of hyperparameters
//   LISTS             lists of tensors: gradients first, means last
//   CARRIES, COLUMN_CARRIES   values that passes over a tensor carry to later ones, for each row and each column
//   WIDTH             hyperparameters in a row
//   KNOWN             sums over each tensor that a run is given
//   SUMS, STAGES      sums over each tensor that a run computes, and the passes that compute them
//   FIRST_SUM         the first of the SUMS of each of these passes, and SUMS
//   MEASURES          these passes, over one chunk of one tensor
//   MEANS             means over the rows of each matrix
//   MEAN_OF           for each stage its mean, or -1
//   MEANS_BY_COLUMNS  for each mean, whether it has a number for each column
//   COLUMNS           for each stage what follows it, once for each matrix, or null
//   update, UPDATES   the last pass, and whether it exists
//
// Tensors are cut into chunks, and a task is one pass or all passes over one chunk. Each thread has a queue of tasks.
// It is the same in every step, so that a thread finds its part of the tensors in its cache. A thread that has finished
// its queue takes tasks from the others. Each chunk writes its sums to its own slot, and the slots of a tensor are added
// in their order, so results depend neither on the number of threads nor on which thread runs which task.
//
// A tensor may be a stack of matrices. Then a chunk has rows of one matrix, or whole matrices.

namespace {

// the bits of the passes of a task: UPDATE, and one for each stage
constexpr int64_t UPDATE = 1;
constexpr int64_t measure_bit(int64_t stage) { return int64_t(2) << stage; }

struct Task {
    int64_t tensor, start, length, columns, slot, passes, matrix;
};

struct alignas(64) Cursor {
    std::atomic<int64_t> next;
};

struct Table {
    int64_t tensors, tasks;
    const Task* serial;                // all tasks in an order for one thread
    int64_t threads;                   // the number of queues
    const Task* queued;                // all tasks, queue by queue
    const int64_t* queues;             // the first task of each queue, and the number of tasks
    Cursor* cursors;                   // the next task of each queue
    void* const* pointers;             // POINTERS of each tensor; a gradient of null skips the tensor
    const int64_t* matrices;           // of each tensor; 1 if chunks do not consist of rows of a matrix
    const int64_t* rows;               // of each matrix of a tensor
    const int64_t* row;                // of each tensor
    const Scalar* scalars;             // WIDTH of each row
    const Scalar* inv_scale;           // one number
    const Scalar* grad_scale;          // of each row
    const int64_t* columns;            // from one row of a tensor to the next; 1 for tensors of one dimension
    const int64_t* slots;              // the first slot of each tensor, and the number of slots
    double* partials;                  // SUMS of each slot
    double* totals;                    // KNOWN and SUMS of each tensor
    std::atomic<int64_t>* progress;    // of each tensor: chunks measured in this run, in all stages
    std::atomic<int64_t>* ready;       // of each tensor: stages whose sums are in totals
    int64_t* runs;                     // how often the table was run to the end
};

constexpr int64_t TOTALS = KNOWN + SUMS;

// the sums of each slot of which means are computed come last
constexpr int64_t MEAN_SUMS = LISTS + CARRIES + COLUMN_CARRIES;
constexpr int64_t POINTERS = MEAN_SUMS + MEANS;

// add the sums over the chunks of each matrix, in their order, and divide by the number of rows
void average(const Table& table, int64_t tensor, int64_t mean) {
    void* const* pointers = table.pointers + tensor * POINTERS;
    const int64_t matrices = table.matrices[tensor], width = MEANS_BY_COLUMNS[mean] ? table.columns[tensor] : 1;
    const int64_t chunks = (table.slots[tensor + 1] - table.slots[tensor]) / matrices;
    const double rows = table.rows[tensor];
    auto means = static_cast<Scalar*>(pointers[LISTS - MEANS + mean]);
    auto sums = static_cast<double*>(pointers[MEAN_SUMS + mean]);
    for (int64_t matrix = 0; matrix < matrices; matrix++, means += width, sums += chunks * width) {
        for (int64_t chunk = 1; chunk < chunks; chunk++)
            for (int64_t i = 0; i < width; i++) sums[i] += sums[chunk * width + i];
        for (int64_t i = 0; i < width; i++) means[i] = static_cast<Scalar>(sums[i] / rows);
    }
}

void add_up(const Table& table, int64_t tensor, int64_t stage) {
    double* totals = table.totals + tensor * TOTALS + KNOWN;
    for (int64_t sum = FIRST_SUM[stage]; sum < FIRST_SUM[stage + 1]; sum++) {
        double total = 0;
        for (int64_t slot = table.slots[tensor]; slot < table.slots[tensor + 1]; slot++)
            total += table.partials[slot * SUMS + sum];
        totals[sum] = total;
    }
}

// all queues have the tensors in the same order, so other threads are measuring what is missing
void wait_for(const Table& table, int64_t tensor, int64_t stages) {
    while (table.ready[tensor].load(std::memory_order_acquire) < stages) std::this_thread::yield();
}

void run_task(const Table& table, const Task& task) {
    const int64_t tensor = task.tensor;
    void* const* pointers = table.pointers + tensor * POINTERS;
    if (pointers[0] == nullptr) return;
    const Scalar* scalars = table.scalars + table.row[tensor] * WIDTH;
    const Scalar* scale = table.grad_scale + table.row[tensor];
    double* totals = table.totals + tensor * TOTALS;
    const int64_t first = task.start * table.columns[tensor];
    for (int64_t stage = 0; stage < STAGES; stage++) {
        if (!(task.passes & measure_bit(stage))) continue;
        wait_for(table, tensor, stage);
        const int64_t mean = MEAN_OF[stage];
        double* sums = table.partials + task.slot * SUMS + FIRST_SUM[stage];
        if (mean >= 0) {
            const int64_t width = MEANS_BY_COLUMNS[mean] ? task.columns : 1;
            sums = static_cast<double*>(pointers[MEAN_SUMS + mean]) + (task.slot - table.slots[tensor]) * width;
        }
        MEASURES[stage](pointers, scalars, table.inv_scale, scale, totals, sums, task.start, first, task.length,
                        task.columns, task.matrix);
        const int64_t chunks = table.slots[tensor + 1] - table.slots[tensor];
        if (chunks == 1 || table.progress[tensor].fetch_add(1) + 1 == chunks * (stage + 1)) {
            if (mean >= 0) average(table, tensor, mean);
            add_up(table, tensor, stage);
            const int64_t rows = table.rows[tensor];
            for (int64_t matrix = 0; COLUMNS[stage] != nullptr && matrix < table.matrices[tensor]; matrix++)
                COLUMNS[stage](pointers, scalars, table.inv_scale, scale, totals, nullptr, matrix * rows,
                               matrix * rows * task.columns, rows, task.columns, matrix);
            table.ready[tensor].store(stage + 1, std::memory_order_release);
        }
    }
    if constexpr (UPDATES) {
        if (task.passes & UPDATE) {
            wait_for(table, tensor, STAGES);
            update(pointers, scalars, table.inv_scale, scale, totals, nullptr, task.start, first, task.length,
                   task.columns, task.matrix);
        }
    }
}

void run_serially(const Table& table) {
    for (int64_t i = 0; i < table.tasks; i++) run_task(table, table.serial[i]);
}

void run_queue(const Table& table, int64_t queue) {
    for (int64_t i; (i = table.cursors[queue].next.fetch_add(1, std::memory_order_relaxed)) < table.queues[queue + 1];)
        run_task(table, table.queued[i]);
}

void run_table(const Table& table) {
    for (int64_t i = 0; STAGES > 0 && i < table.tensors; i++) {
        table.progress[i].store(0, std::memory_order_relaxed);
        table.ready[i].store(0, std::memory_order_relaxed);
        if constexpr (!UPDATES) std::fill_n(table.totals + i * TOTALS + KNOWN, SUMS, 0.0);  // if it is skipped
    }
    const int64_t threads = table.threads;
    if (threads == 1) {
        run_serially(table);
        return;
    }
    for (int64_t i = 0; i < threads; i++) table.cursors[i].next.store(table.queues[i], std::memory_order_relaxed);
    #pragma omp parallel num_threads(threads)
    {
        const int64_t own = omp_get_thread_num();
        if (omp_get_num_threads() == threads) {
            for (int64_t i = 0; i < threads; i++) run_queue(table, (own + i) % threads);
        } else if (own == 0) {  // a queue without its thread could make the others wait for ever
            run_serially(table);
        }
    }
}

bool read_integers(PyObject* const* args, Py_ssize_t given, Py_ssize_t expected, int64_t* values) {
    if (given != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
        return false;
    }
    for (Py_ssize_t i = 0; i < expected; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

// run(address of a Table)
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t address;
    if (!read_integers(args, count, 1, &address)) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    const Table& table = *reinterpret_cast<const Table*>(address);
    run_table(table);
    ++*table.runs;
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// same(tensors, other tensors, address of addresses, address of the function that returns the memory of a tensor):
// whether two lists hold the same tensors, and whether these are still in the memory at the addresses
PyObject* same(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t values[2];
    if (count < 2 || !read_integers(args + 2, count - 2, 2, values)) return nullptr;
    if (!PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two lists");
        return nullptr;
    }
    const Py_ssize_t size = PyList_GET_SIZE(args[0]);
    if (size != PyList_GET_SIZE(args[1])) Py_RETURN_FALSE;
    auto addresses = reinterpret_cast<void* const*>(values[0]);
    auto memory = reinterpret_cast<void* (*)(PyObject*)>(values[1]);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject* tensor = PyList_GET_ITEM(args[0], i);
        if (tensor != PyList_GET_ITEM(args[1], i) || memory(tensor) != addresses[i]) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

// fill(tensors or None, address of pointers, address of the function that returns the memory of a tensor): write the
// addresses of gradients, null for None. A gradient without memory is present: it gets the address 1.
PyObject* fill(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t values[2];
    if (count < 1 || !read_integers(args + 1, count - 1, 2, values)) return nullptr;
    PyObject* tensors = PySequence_Fast(args[0], "expected a sequence of tensors");
    if (tensors == nullptr) return nullptr;
    auto pointers = reinterpret_cast<uintptr_t*>(values[0]);
    auto memory = reinterpret_cast<void* (*)(PyObject*)>(values[1]);
    PyObject** items = PySequence_Fast_ITEMS(tensors);
    for (Py_ssize_t i = 0, n = PySequence_Fast_GET_SIZE(tensors); i < n; i++) {
        uintptr_t address = 0;
        if (items[i] != Py_None) {
            address = reinterpret_cast<uintptr_t>(memory(items[i]));
            if (address == 0) address = 1;
        }
        pointers[i * POINTERS] = address;
    }
    Py_DECREF(tensors);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL, nullptr},
    {"same", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(same)), METH_FASTCALL, nullptr},
    {"fill", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fill)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef_Slot module_slots[] = {{0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "table_unit", nullptr, 0, methods, module_slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_table_unit(void) { return PyModuleDef_Init(&module); }
